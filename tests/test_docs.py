"""The documentation is true: its Python runs, its links lead somewhere."""

import re
from pathlib import Path

import pytest

from fresh import run_each
from intbmoe.export.export import export_run

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"])


# timm and transformers import torchvision if it is installed, and fail if that fails.
FOREIGN = """
from intbmoe.foreign import import_torchvision
import_torchvision(required=False)
import transformers.models.auto.modeling_auto, transformers.modeling_utils
"""


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# Their Python needs a trained run, data, or other packages and ranks, so other tests run it.
ELSEWHERE = ("training.md", "your-data.md", "in-your-framework.md")
FOLDERS = {"serving.md": ("DIR",)}
"""For each page, the artifacts in the folder where its Python runs."""
RUNNABLE = [page for page in PAGES if snippets(page) and page.name not in ELSEWHERE]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """For each page, the exit status and output of its Python, in its own process: a page may register a method."""
    scripts = {page: tmp_path_factory.mktemp(page.stem) / "snippets.py" for page in RUNNABLE}
    for page, script in scripts.items():
        script.write_text("\n".join(snippets(page)), encoding="utf-8")
        for name in FOLDERS.get(page.name, ()):
            export_run("zoo:digits", script.parent / name)
    return dict(zip(scripts, run_each(scripts.values(), FOREIGN), strict=True))


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_snippets_run_in_order(page, ran):
    code, output = ran[page]
    assert code == 0, output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_python_escapes_in_an_indented_block(page):
    assert re.findall(r"^    (?:from|import) .*", page.read_text(encoding="utf-8"), flags=re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_table_has_a_line_for_each_row(page):
    joined = re.findall(r"^.*\S.*\| *\| *:?-{2,}.*", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [line for line in joined if not re.match(r" *\|[ :|-]+\|$", line)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert broken == []
