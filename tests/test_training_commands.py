"""What ``train``, ``compare``, ``eval`` and ``analyse`` tell the user when something is wrong."""

import shlex
import sys

import pytest

from intbmoe.cli import main
from intbmoe.recipes import load_recipe
from intbmoe.tasks import DataError
from intbmoe.train import RunDirectory, signals

SMALL = [
    *("--model.dim", "16", "--model.depth", "2", "--model.heads", "2", "--model.hidden", "16"),
    *("--model.moe-layers", "0", "--moe.name", "switch", "--moe.experts", "2"),
    *("--train.steps", "1", "--train.batch", "8", "--quiet", "True"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(args):
    """The error message of a command that is refused."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert str(ended.value.code).startswith("intbmoe: ")
    return str(ended.value.code)


def test_a_run_and_the_command_that_evaluates_it(capsys):
    args = ["train", "digits", "--root", "ru ns", *SMALL]
    main(args)
    said = capsys.readouterr().out
    assert said.startswith("finished: ru ns/digits/switch/0\n")
    command = said.splitlines()[-1].partition(": ")[2]
    main(shlex.split(command)[1:])
    assert "test accuracy: " in capsys.readouterr().out
    main(args)
    assert capsys.readouterr().out == f"already {said}"


@pytest.mark.parametrize("command", [["train", "digits", *SMALL], ["compare", "digits", "--methods", "dense"]])
@pytest.mark.parametrize("name", ["../../x", ""])
def test_a_name_does_not_lead_out_of_the_root(command, name, tmp_path):
    assert "name must be usable as the name of a folder" in refused([*command, "--name", name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["train", "digits", *SMALL], ["compare", "digits", "--methods", "dense"]])
def test_a_root_that_cannot_be_written_is_a_message(command, tmp_path):
    (tmp_path / "file").touch()
    assert "Not a directory: 'file/x/digits/" in refused([*command, "--root", "file/x"])


@pytest.mark.parametrize("seed", [["--train.seed", "3"], ["--train.seed=3"]])
def test_seeds_of_a_comparison_are_not_one_runs(seed):
    message = refused(["compare", "digits", "--methods", "dense", *seed])
    assert "--seeds N takes the first N of the recipe's seeds (0, 1, 2)" in message


def test_a_damaged_run_is_a_message(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    for command in ("eval", "analyse"):
        assert "config.yaml cannot be read" in refused([command, str(tmp_path)])


@pytest.mark.parametrize(("command", "call"), [("eval", "train.evaluate"), ("analyse", "analysis.analyse.analyse")])
def test_lost_data_and_a_disk_that_is_not_writable_are_messages(command, call, tmp_path, monkeypatch):
    recipe = load_recipe("foursquare")
    object.__setattr__(recipe.data, "path", "some.npz")
    RunDirectory(tmp_path).claim(recipe)

    def fail_with(error):
        def fail(*_):
            raise error

        module, _, name = f"intbmoe.{call}".rpartition(".")
        monkeypatch.setattr(sys.modules[module], name, fail)
        return refused([command, str(tmp_path)])

    assert f"gone\n(data.path comes from {tmp_path}/config.yaml" in fail_with(DataError("gone"))
    assert "Read-only file system: 'x'" in fail_with(OSError(30, "Read-only file system", "x"))


def test_only_a_comparisons_run_waits_for_another_process(monkeypatch, capsys):
    waited = []

    def note(recipe, root, quiet, wait):
        waited.append(wait is not None)
        sys.exit()

    monkeypatch.setattr(sys.modules["intbmoe.train"], "train", note)
    for started_by_one in (True, False):
        monkeypatch.setattr(signals, "belongs_to_another", lambda answer=started_by_one: answer)
        with pytest.raises(SystemExit):
            main(["train", "digits", *SMALL])
    assert waited == [True, False]
