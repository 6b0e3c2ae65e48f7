"""``make demo``: runs its whole command and checks what it leaves. It takes minutes; its parts have quick tests."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from intbmoe.recipes import load_recipe
from intbmoe.recipes.sets import TABLE_1

MAKEFILE = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
COMMAND = re.search(r"^demo:.*\n(?:\t.*\n)*?\t@\$\(BIN\)/intbmoe (.*)$", MAKEFILE, flags=re.MULTILINE)


def test_the_demo_compares_all_methods_on_data_that_needs_no_file():
    assert shlex.split(COMMAND[1]) == ["compare", "digits", "--methods", "all"]
    assert load_recipe("digits").data.path is None


@pytest.mark.slow
def test_the_demo_trains_every_method(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "intbmoe.cli", *shlex.split(COMMAND[1])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "runs/digits/compare/all.json").read_text())
    trained = {record["label"]: record["mean"] for record in records if record["mean"] is not None}
    assert set(trained) == set(TABLE_1)
    assert trained["intbmoe"] >= 0.95
    assert min(trained.values()) >= 0.85, trained
    assert (tmp_path / "runs/digits/compare/all.png").is_file()
    assert "Next:" in done.stdout
