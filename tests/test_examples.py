import subprocess
import sys
from pathlib import Path

LAYER = Path(__file__).parent.parent / "examples" / "layer.py"
PNG = b"\x89PNG"


def test_the_layer_example_runs_and_leaves_table_and_picture(tmp_path, forked):
    quick = ["--steps", "20", "--repeats", "2", "--experts", "1", "4"]
    done = subprocess.run([sys.executable, LAYER, *quick], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 20/20" in done.stdout, "without a terminal, progress is plain lines"
    assert "differ by at most" in done.stdout
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert rows == ["1", "4"], "one row of the table for each E"
    assert (tmp_path / "layer.png").read_bytes().startswith(PNG)
