"""docs/in-your-framework.md is true: each of its snippets runs as printed, after the first one."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from intbmoe.tasks.vision.timm_data import import_torchvision

PAGE = Path(__file__).parent.parent / "docs" / "in-your-framework.md"
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", flags=re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
TEXT = PAGE.read_text(encoding="utf-8")
FIRST = SNIPPET.search(TEXT)[1]
SNIPPETS = {title: SNIPPET.findall(body) for title, body in SECTION.findall(TEXT)}
PACKAGES = {"timm": "timm", "Lightning": "lightning", "accelerate": "accelerate", "PEFT": "peft"}
ON_TWO_RANKS = ("DDP", "FSDP2")
SLOW = {"compile": "the compiler takes a minute"}


def test_the_page_has_what_it_promises():
    named = "transformers, timm, Lightning, accelerate, DDP, FSDP2, compile, Export, PEFT, Quantisation"
    titles = set(named.split(", "))
    assert titles < SNIPPETS.keys()
    assert all(SNIPPETS.values())


@pytest.mark.parametrize("title", SNIPPETS)
def test_a_snippet_is_short(title):
    for snippet in SNIPPETS[title]:
        assert len([line for line in snippet.splitlines() if line.strip()]) <= 15


def _require_packages(title):
    for package in ("transformers", PACKAGES.get(title, "torch")):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")


@pytest.mark.parametrize(
    "title", [pytest.param(t, marks=pytest.mark.slow if t in SLOW else ()) for t in SNIPPETS if t not in ON_TWO_RANKS]
)
def test_a_snippet_runs(title, tmp_path, monkeypatch, capsys):
    _require_packages(title)
    import_torchvision()  # transformers and timm import it if it is installed, and fail if that fails
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "snippet"}
    torch.manual_seed(0)
    for code in (FIRST, *SNIPPETS[title]):
        exec(compile(code, f"{PAGE.name}, {title}", "exec"), namespace)
    if title == "Quantisation":
        assert "not quantised" in capsys.readouterr().out
        assert 0 < namespace["error"] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("title", ON_TWO_RANKS)
def test_a_snippet_runs_on_two_ranks(title, tmp_path):
    _require_packages(title)
    script = tmp_path / "train.py"
    help_torchvision = "from intbmoe.tasks.vision.timm_data import import_torchvision\nimport_torchvision()\n"
    script.write_text(help_torchvision + "\n".join([FIRST, *SNIPPETS[title]]), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
