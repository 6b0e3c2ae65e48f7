"""The README is true: its snippets run, its links lead somewhere, its commands exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_each_snippet_runs_by_itself():
    assert SNIPPETS
    for number, snippet in enumerate(SNIPPETS, start=1):
        exec(compile(snippet, f"README.md, snippet {number}", "exec"), {"__name__": "readme"})


def test_it_is_short():
    assert len(README.split()) <= 700


def test_the_quantities_shown_are_those_of_the_layer():
    namespace = {}
    exec(SNIPPETS[0], namespace)
    assert repr(namespace["ffn"].quantities()) in README


def test_links_lead_to_files():
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_commands_are_targets():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    # In a code block a command starts the line; in a sentence it is quoted.
    named = re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE)
    assert {"demo", "test"} <= set(named) <= set(targets)
