"""The train and compare commands of README.md and the guides parse; the recipe shown in docs/training.md trains."""

import re
import shlex
from pathlib import Path

import pytest

from intbmoe.cli import COMMANDS, main
from intbmoe.commands.overrides import parse_recipe, take_method_options
from intbmoe.commands.training import TrainOptions
from intbmoe.compare.plan import CompareOptions
from intbmoe.recipes import load_recipe
from intbmoe.recipes.sets import find_variants

ROOT = Path(__file__).parent.parent
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(ROOT / "docs" / "adding-a-task.md")  # tests/tasks/test_adding_a_task.py runs its commands
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES).replace("\\\n", " ")
LINES = re.findall(r"^ *(?:torchrun .*-m intbmoe|intbmoe) (.*)$", TEXT, flags=re.MULTILINE)
LINES += re.findall(r"`intbmoe ([a-z]+ [^`]*)`", TEXT)
COMMANDS_SHOWN = [shlex.split(line, comments=True) for line in LINES]
SHOWN = [args for args in COMMANDS_SHOWN if args and not any(word.isupper() for word in args)]  # no RECIPE etc.


def own_recipe(folder):
    path = folder / "mine.yaml"
    path.write_text(re.search(r"^```yaml\n(.*?)^```", TRAINING, flags=re.MULTILINE | re.DOTALL)[1], encoding="utf-8")
    return path


def test_commands_are_found():
    assert {args[0] for args in SHOWN} >= {"train", "compare", "eval", "recipes"}
    assert {args[0] for args in SHOWN} <= set(COMMANDS)


@pytest.mark.parametrize("args", [args for args in SHOWN if args[0] in ("train", "compare")], ids=" ".join)
def test_commands_with_a_recipe_parse(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_recipe(tmp_path)
    command, *rest = args
    if rest[-1] == "--help":
        with pytest.raises(SystemExit) as exit_info:
            main(args)
        assert exit_info.value.code == 0
        return
    own, rest = take_method_options(rest) if command == "compare" else ({}, rest)
    recipe, options = parse_recipe(command, {"train": TrainOptions, "compare": CompareOptions}[command](), rest, "")
    if command == "compare":
        assert find_variants(recipe, options.methods, own)


def test_the_recipe_shown_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert load_recipe(own_recipe(tmp_path)).train.lr == 3e-3
    main(["train", "mine.yaml", "--quiet", "True"])
    assert "finished: runs/mine/intbmoe/0" in capsys.readouterr().out
