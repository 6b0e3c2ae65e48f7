"""The pages of the site. ``.ci/site`` checks that it builds and has no broken links."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import intbmoe

pytest.importorskip("latex2mathml")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    module = runpy.run_path(str(ROOT / "docs" / "make_site.py"))
    module["make"](folder)
    return folder


def test_a_folder_that_exists_is_not_replaced(tmp_path, forked):
    (tmp_path / "kept").touch()
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_site.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "name a new folder" in done.stderr
    assert (tmp_path / "kept").exists()


def pages_of(nav):
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)]


def test_every_page_is_in_the_navigation(site):
    nav = tomllib.loads((site / "zensical.toml").read_text())["project"]["nav"]
    docs = site / "docs"
    assert sorted(pages_of(nav)) == sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))


def test_links_lead_to_pages(site):
    for page in (site / "docs").rglob("*.md"):
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == [], page


def test_a_method_has_its_equations_traits_and_options(site):
    text = (site / "docs" / "methods" / "intbmoe.md").read_text(encoding="utf-8")
    assert "α<sub>b</sub><sup>p</sup> = A<sub>p</sub> q<sub>b</sub>" in text
    assert "Σ<sub>b ∈ B<sub>t</sub></sub>" in text
    assert "| `experts` | `16` | `16` | E, the number of expert bases" in text
    assert "| participation | 16 |" in text


def test_equations_of_pages_are_mathml_and_code_stays(site):
    text = (site / "docs" / "method.md").read_text(encoding="utf-8")
    assert "<math" in text
    assert "$" not in re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "0x" not in (site / "docs" / "reference.md").read_text(encoding="utf-8")  # no memory address


def test_the_reference_has_every_public_name(site):
    text = (site / "docs" / "reference.md").read_text(encoding="utf-8")
    assert [name for name in intbmoe.__all__ if f"## `{name}`\n" not in text] == []
