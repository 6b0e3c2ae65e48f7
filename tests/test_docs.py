"""The documentation is true: its Python runs, its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"])


# timm and transformers import torchvision where it is installed, and fail where that fails.
TORCHVISION = "import intbmoe.foreign\nintbmoe.foreign.import_torchvision(required=False)"


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# Their Python needs a trained run, data, or other packages and ranks: tests of their own run them.
ELSEWHERE = ("training.md", "your-data.md", "in-your-framework.md")
RUNNABLE = [page for page in PAGES if snippets(page) and page.name not in ELSEWHERE]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_snippets_run_in_order(page, tmp_path):
    """In a process of their own: a page may register a method, which other tests should not see."""
    script = tmp_path / "snippets.py"
    script.write_text("\n".join([TORCHVISION, *snippets(page)]), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert broken == []
