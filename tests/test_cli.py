import json
import os
import re
import subprocess
import sys
from io import BytesIO, TextIOWrapper

import pytest

import intbmoe
from forked import ForkedPopen
from intbmoe.cli import COMMANDS, main
from intbmoe.recipes import list_recipes
from intbmoe.recipes.sets import SETS
from intbmoe.registry import find_method


def test_methods_lists_every_method(capsys):
    main(["methods"])
    table = capsys.readouterr().out
    for name in intbmoe.list_methods():
        assert name in table
        assert find_method(name).title in table
    lory = next(line for line in table.splitlines() if line.startswith("lory "))
    assert re.split(r"\s{2,}", lory.strip()) == ["lory", "Lory", "17", "1", "1 per segment"]
    assert "  soft: every slot of Soft MoE mixes all tokens" in table


def test_methods_draws_the_quantities(tmp_path, capsys):
    paths = [tmp_path / "new" / name for name in ("quantities.svg", "again.svg", "quantities.png")]
    for path in paths:
        main(["methods", "--picture", str(path)])
        assert f"drawn: {path}" in capsys.readouterr().err
    drawn, again, png = (path.read_bytes() for path in paths)
    assert drawn == again
    assert b"prefers-color-scheme: dark" in drawn
    assert png.startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"quantities.jpg: a picture must end in .png or .svg"):
        main(["methods", "--picture", str(tmp_path / "quantities.jpg")])


@pytest.mark.parametrize(("command", "names"), [("methods", intbmoe.list_methods()), ("recipes", list_recipes())])
def test_names_to_type_stay_whole_in_a_narrow_terminal(command, names, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    main([command])
    shown = capsys.readouterr().out
    assert "─" * 30 in shown
    assert "─" * 41 not in shown
    for name in names:
        assert f"\n{name} " in shown


def test_methods_as_json(capsys):
    main(["methods", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == intbmoe.list_methods()
    for row in rows:
        assert row["participation"] in ("dense", "sparse")
        assert row["causal"] == (row["noncausal_reason"] is None)
    three = {row["name"]: tuple(row["quantities"].values()) for row in rows}
    assert three["intbmoe"] == (16, 2, 8)
    assert three["smear"] == (17, 1, "1 per example")
    assert three["smear_token"] == (17, 1, "1 per token")
    assert three["lory"] == (17, 1, "1 per segment")
    assert three["vmoe"] == (2, 2, 0)


def test_the_package_can_be_run():
    done = subprocess.run([sys.executable, "-m", "intbmoe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"intbmoe {intbmoe.__version__}\n"


def test_help_lists_every_command(capsys):
    main(["--help"])
    assert re.findall(r"\n  (\w+)  ", capsys.readouterr().out) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_exits_with_zero_and_fits_into_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: intbmoe {command} " in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith("usage:"))
    options = " ".join(shown.replace("│", " ").split()).split(" --")
    assert not [option for option in options if "Default: " in option and "(default: " in option]


def test_the_help_of_a_command_for_recipes_names_them_and_is_short(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 24
    for name in list_recipes():
        assert name in shown


def test_recipes_lists_recipes_and_sets(capsys):
    main(["recipes"])
    shown = capsys.readouterr().out
    for name in (*list_recipes(), *SETS):
        assert f"\n{name} " in shown


QUICK = [
    *("--model.dim", "16", "--model.depth", "2", "--model.heads", "2", "--model.hidden", "16"),
    *("--model.moe-layers", "0", "--train.epochs", "1", "--train.warmup", "0", "--quiet", "True"),
]


def test_train_eval_and_load(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ["train", "digits", "--moe.name", "switch", "--moe.experts", "2", *QUICK]
    main(args)
    trained = capsys.readouterr().out
    assert "finished: runs/digits/switch/0" in trained
    assert "intbmoe eval runs/digits/switch/0" in trained
    main(["eval", "runs/digits/switch/0", "--json"])
    metrics = json.loads(capsys.readouterr().out)
    assert f"accuracy {metrics['accuracy']:.4f}" in trained
    main(["eval", "runs/digits/switch/0", "--split", "valid"])
    assert "valid accuracy: 0." in capsys.readouterr().out
    assert intbmoe.load("runs/digits/switch/0").config.dim == 16
    with pytest.raises(SystemExit, match=r"no config\.yaml; below it: runs/digits/switch/0$"):
        main(["eval", "runs"])
    with pytest.raises(SystemExit, match="it is a run: intbmoe export runs/digits/switch/0 --to DIR"):
        main(["generate", "runs/digits/switch/0", "--prompt", ""])
    with pytest.raises(SystemExit, match=r"another configuration(.|\n)*train.lr"):
        main([*args, "--train.lr", "0.5"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "digts"], "no recipe is called 'digts': did you mean 'digits'?"),
        (["train"], "starts with a recipe: beauty, checkins, checkins-told"),
        (["train", "digits", "--moe.name", "swich"], "did you mean 'switch'?"),
        (["train", "digits", "--moe.options.top-k", "99"], "top_k=99 is not allowed"),
        (["train", "tiny-imagenet"], "path"),
        (["train", "stdlib", "--moe.name", "soft"], "cannot be used in a causal model"),
        (["compare", "digits", "--methods", "ablation"], "did you mean 'ablations'?"),
        (["compare", "digits", "--moe.label", "x"], "--name"),
        (["eval", "runs/nothing"], "runs/nothing is not a run directory"),
        (["prepare", "minipil", "from", "to"], "did you mean 'minipile'?"),
        (["prepare", "minipile", "nowhere", "to"], "nowhere"),
        (["prepare", "wikipedia", "nowhere", "to"], "nowhere"),
        (["prepare", "inttravel", "nowhere", "to"], "nowhere"),
    ],
)
def test_mistakes_end_with_a_message_and_no_traceback(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    assert message in str(exit_info.value.code)


def test_what_is_prepared_can_be_trained_on(tmp_path, monkeypatch, capsys):
    from intbmoe.tasks.travel.generator import make_journeys
    from inttravel_tables import write_tables

    monkeypatch.chdir(tmp_path)
    write_tables(make_journeys(users=30), tmp_path / "raw")
    main(["prepare", "inttravel", "raw", "ready"])
    printed = capsys.readouterr().out
    assert "ready: ready" in printed
    assert "intbmoe train inttravel --data.path ready" in printed
    small = ["--data.source", "inttravel", "--data.path", "ready", "--moe.name", "dense", "--train.steps", "2"]
    main(["train", "journeys", *small, "--quiet", "True"])
    assert "HR@5" in capsys.readouterr().out


def test_letters_that_the_terminal_does_not_have_are_escaped(monkeypatch):
    printed = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(printed, encoding="ascii"))
    main(["methods", "--json"])
    rows = json.loads(printed.getvalue().decode("ascii").replace("\\x", "\\u00"))
    assert [row["title"] for row in rows] == [find_method(name).title for name in intbmoe.list_methods()]


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("intbmoe ")


def test_a_misspelt_command_is_an_error_with_a_suggestion():
    with pytest.raises(SystemExit, match=r"did you mean 'methods'\?"):
        main(["metods"])


def test_a_misspelt_option_is_an_error(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["methods", "--jsn"])
    assert exit_info.value.code != 0
    assert "--json" in capsys.readouterr().err


def test_importing_the_library_stays_light_and_leaves_the_command_line_alone():
    heavy = {"tyro", "rich", "accelerate", "yaml", "safetensors", "sklearn", "torch._dynamo", "transformers"}
    code = f"import sys, intbmoe; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# A new Python also shows how it exits; the fork, which saves seconds of imports, shows the same for help.
@pytest.mark.parametrize(
    ("popen", "args"), [(subprocess.Popen, ["methods"]), (ForkedPopen, ["train", "digits", "--help"])]
)
def test_a_reader_that_has_seen_enough_is_no_error(popen, args):
    """The worst case of ``intbmoe methods | head -3``: the reader is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    command = popen([sys.executable, "-m", "intbmoe.cli", *args], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    _, errors = command.communicate()
    assert (command.returncode, errors) == (1, "")
