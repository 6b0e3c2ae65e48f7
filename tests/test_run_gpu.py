"""That ``run_gpu.py`` shares tests out among processes; the tests here need no GPU, only its mark."""

import os
import subprocess
import sys
from pathlib import Path

SHARED = """
import os, pathlib, pytest
done = pathlib.Path(__file__).parent / "done"

@pytest.fixture(scope="module", params=["a", "b"])
def shared(request):
    return request.param

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(8))
def test_alone(number):
    (done / f"alone-{number}-{os.getpid()}").touch(exist_ok=False)

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(3))
def test_together(shared, number):
    (done / f"{shared}-{number}-{os.getpid()}").touch(exist_ok=False)

def test_without_the_mark():
    raise AssertionError
"""
BROKEN = "\n@pytest.mark.gpu\ndef test_broken():\n    assert 1 == 2\n"


def run(folder, text):
    (folder / "done").mkdir(parents=True)
    (folder / "test_shared.py").write_text(text)
    command = [sys.executable, Path(__file__).with_name("run_gpu.py"), "--processes", "2", folder / "test_shared.py"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, [path.name.split("-") for path in (folder / "done").iterdir()]


def test_every_test_runs_once_and_those_with_one_fixture_in_one_process(tmp_path):
    code, output, done = run(tmp_path, SHARED)
    assert (code, "14 passed in 2 processes" in output) == (0, True), output
    assert sorted(number for kind, number, _ in done if kind == "alone") == list("01234567")
    for kind in "ab":
        found = [(number, process) for name, number, process in done if name == kind]
        assert len({process for _, process in found}) == 1
        assert sorted(number for number, _ in found) == list("012")


def test_a_failure_is_shown_and_ends_it_badly(tmp_path):
    code, output, done = run(tmp_path, SHARED + BROKEN)
    assert code == 1
    assert "assert 1 == 2" in output
    assert "1 failure, 14 passed in 2 processes" in output
    assert len(done) == 14
