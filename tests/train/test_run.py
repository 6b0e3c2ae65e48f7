"""The run directory: what is in it, and what is refused."""

import json
import os
import subprocess
import time
from dataclasses import replace

import pytest
import yaml
from tiny_task import tiny_recipe

from intbmoe.recipes import load_recipe, recipe_to_dict
from intbmoe.tasks import DataError
from intbmoe.train import RunDirectory
from intbmoe.train.errors import DamagedFileError, RunConflictError, TrainingError
from intbmoe.train.metrics import MetricsFile
from intbmoe.train.run import (
    _from_anywhere,
    describe_environment,
    differing_keys,
    git_state,
    moved_data_is_explained,
    run_lock,
)
from lock_holder import FORK


@pytest.fixture
def run(tmp_path):
    recipe = tiny_recipe()
    run = RunDirectory.of(recipe, tmp_path)
    run.path.mkdir(parents=True)
    run.claim(recipe)
    return run


def test_where_a_run_lies(tmp_path):
    recipe = tiny_recipe(seed=5)
    assert RunDirectory.of(recipe, tmp_path).path == tmp_path / "tiny" / "switch" / "5"
    labelled = replace(recipe, moe=replace(recipe.moe, label="variant"))
    assert RunDirectory.of(labelled, tmp_path).path == tmp_path / "tiny" / "variant" / "5"


def test_the_recipe_comes_back(run):
    assert run.recipe == tiny_recipe()
    assert yaml.safe_load(run.config_path.read_text()) == recipe_to_dict(tiny_recipe())


def test_data_that_are_no_files_cannot_lie_elsewhere(run):
    with pytest.raises(DataError, match=r"data='there': the task 'tiny.*reads no files: leave data out"):
        run.recipe_on("there")


def begin(run):
    """Mark the run as trained for one step."""
    run.metrics_path.write_text('{"step": 1}\n')


def test_another_configuration_is_refused_by_the_keys_that_differ(run):
    begin(run)
    with pytest.raises(RunConflictError) as caught:
        run.claim(tiny_recipe(lr=0.5, betas=(0.8, 0.9)))
    message = str(caught.value)
    assert "train.lr: 0.01 there, 0.5 now" in message
    assert "train.betas" in message
    assert "train.batch" not in message
    assert "moe.label" in message
    assert run.recipe == tiny_recipe()


def test_a_run_of_an_earlier_version_goes_on(run):
    """Its configuration has ``decay_all`` and lacks later settings."""
    begin(run)
    config = yaml.safe_load(run.config_path.read_text())
    del config["train"]["undecayed"], config["train"]["cooldown"]
    run.config_path.write_text(yaml.safe_dump({**config, "train": {**config["train"], "decay_all": True}}))
    run.claim(tiny_recipe())
    with pytest.raises(RunConflictError, match=r"train\.undecayed: \[\] there, \['norms'\] now"):
        run.claim(tiny_recipe(undecayed=("norms",)))


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step-00000003/state.json", "done.json"])
def test_before_anything_is_trained_settings_may_be_corrected(run, left):
    run.metrics_path.touch()
    run.config_path.write_text("")  # not even read
    run.claim(tiny_recipe(lr=0.5))
    assert run.recipe == tiny_recipe(lr=0.5)
    (run.path / left).parent.mkdir(parents=True, exist_ok=True)
    (run.path / left).write_text("{}\n")
    with pytest.raises(RunConflictError, match=r"train\.lr"):
        run.claim(tiny_recipe())


def test_data_is_found_from_any_working_directory(tmp_path, monkeypatch):
    def recipe(path):
        known = load_recipe("foursquare")
        return replace(known, data=replace(known.data, path=path))

    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.claim(recipe("some.npz"))
    begin(run)
    assert run.recipe.data.path == str(tmp_path / "data" / "some.npz")
    assert run.recipe_on(None) == run.recipe
    assert run.recipe_on("other.npz").data.path == str(tmp_path / "data" / "other.npz")
    for spelling in ("some.npz", "./some.npz", str(tmp_path / "data/some.npz")):
        run.claim(recipe(spelling))
    monkeypatch.chdir(tmp_path)
    run.claim(recipe("data/some.npz"))
    with pytest.raises(RunConflictError, match=r"If the same data has moved, set data\.path in .*config\.yaml"):
        run.claim(recipe("some.npz"))
    with pytest.raises(RunConflictError, match=r"add --moe\.label LABEL, --name NAME or --root FOLDER") as caught:
        run.claim(recipe(None))
    assert "has moved" not in str(caught.value)
    with pytest.raises(DataError, match=r"^gone\n.*comes from .*run/config\.yaml"), moved_data_is_explained(run.path):
        raise DataError("gone")
    run.config_path.write_text(run.config_path.read_text().replace(str(tmp_path / "data/some.npz"), "data/some.npz"))
    run.claim(recipe("data/some.npz"))  # as in old runs


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "../x", "/x", "a\\b"])
def test_a_run_stays_inside_its_root(tmp_path, name):
    with pytest.raises(ValueError, match=r"name=.* must be usable as the name of a folder"):
        RunDirectory.of(replace(tiny_recipe(), name=name), tmp_path)


def test_what_computes_nothing_else_may_change(run):
    begin(run)
    run.claim(tiny_recipe(workers=3, keep_checkpoints=7))
    assert run.recipe.train.workers == 3


def test_checkpoints_without_a_config_are_not_taken_over(run):
    run.config_path.unlink()
    (run.path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(RunConflictError, match=r"no config\.yaml"):
        run.claim(tiny_recipe())


def test_differing_keys():
    old, new = {"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": 1, "c": [2]}, "e": 3}
    assert differing_keys(old, new) == {"a.c": ([1], [2]), "d": (2, None), "e": (None, 3)}


def test_metrics_are_cut_back_to_the_checkpoint(run):
    file = MetricsFile(run.metrics_path, 0)
    file.append({"step": 1, "loss": 0.5})
    length = file.sync()
    file.append({"step": 2, "loss": 0.4})
    file.close()
    with open(run.metrics_path, "a") as torn:
        torn.write('{"step": 3, "lo')
    assert [row["step"] for row in run.metrics()] == [1, 2]
    MetricsFile(run.metrics_path, length).close()
    assert run.metrics() == [{"step": 1, "loss": 0.5}]
    with pytest.raises(DamagedFileError, match="the checkpoint expects 9999"):
        MetricsFile(run.metrics_path, 9999)
    run.metrics_path.write_text('nonsense\n{"step": 1}\n')
    with pytest.raises(DamagedFileError, match="line 1"):
        run.metrics()


def test_unfinished_and_absent_runs_say_so(run, tmp_path):
    assert not run.finished
    with pytest.raises(TrainingError, match="not finished"):
        run.result  # noqa: B018
    with pytest.raises(TrainingError, match="not a run directory"):
        RunDirectory.existing(tmp_path)
    (tmp_path / "artifact.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"an artifact: serve it \(intbmoe serve .*intbmoe\.export\.load_artifact"):
        RunDirectory.existing(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"- 1\n", b"task: 3\n", b"task: [1]\n", b"\xff\xfe", b"a: {", b"task: tiny\n"]
)
def test_a_damaged_config_is_named(run, content):
    begin(run)
    run.config_path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"config\.yaml cannot be read"):
        run.recipe  # noqa: B018
    with pytest.raises(TrainingError, match=r"config\.yaml cannot be read|another configuration"):
        run.claim(tiny_recipe())


SUM = {"model.safetensors": "0" * 64}


@pytest.mark.parametrize(
    "content",
    [[], {}, {"test": {}}, {"sha256": SUM}, {"test": [], "sha256": SUM}, {"test": {"loss": "1"}, "sha256": SUM},
     {"test": {}, "sha256": "model.safetensors"}, {"test": {}, "sha256": {"model.safetensors": None}}],
)  # fmt: skip
def test_a_damaged_result_is_named(run, content):
    (run.path / "done.json").write_text(json.dumps(content))
    with pytest.raises(DamagedFileError, match=r"done\.json cannot be read back"):
        run.result  # noqa: B018
    (run.path / "done.json").write_text(json.dumps({"test": {"loss": 1}, "sha256": SUM}))
    assert run.result["test"] == {"loss": 1}


@pytest.mark.parametrize("line", [b"\xff\n", b"3\n"])
def test_lines_of_something_else_are_named(run, line):
    run.metrics_path.write_bytes(b'{"step": 1}\n' + line)
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl line 2 is not"):
        run.metrics()


def hold(path, held):
    with run_lock(path):
        held.set()
        time.sleep(60)


def test_two_processes_do_not_train_into_one_directory(tmp_path):
    held = FORK.Event()
    holder = FORK.Process(target=hold, args=(tmp_path, held))
    holder.start()
    assert held.wait(30)
    with pytest.raises(RunConflictError, match=f"process {holder.pid} is training"), run_lock(tmp_path):
        pass
    holder.kill()
    holder.join()
    with run_lock(tmp_path):  # the lock ends with the process that held it
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(RunConflictError, match="this process"), run_lock(tmp_path):
            pass


def test_the_environment_names_versions_and_not_the_machine(tmp_path):
    import platform

    import torch

    entry = describe_environment(device=torch.device("cpu"), world=2, seed=3, step=4)
    assert entry["packages"]["torch"] == torch.__version__
    assert (entry["seed"], entry["from_step"], entry["processes"], entry["device"]) == (3, 4, 2, "cpu")
    assert platform.node() not in json.dumps({**entry, "command": None})
    assert git_state(tmp_path) is None


def test_git_state(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    (tmp_path / "__init__.py").write_text("")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert not state["changed"]
    (tmp_path / "__init__.py").write_text("1")
    assert git_state(tmp_path) == {**state, "changed": True}


def test_paths_are_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    found = _from_anywhere({"data": {"path": "~/pets", "tokenizer": "tok.json"}, "train": {"start": "zoo:digits"}})
    assert found["data"] == {"path": "/home/me/pets", "tokenizer": str(tmp_path / "tok.json")}
    assert found["train"] == {"start": "zoo:digits"}
    assert _from_anywhere({"data": {"tokenizer": "bpe"}}) == {"data": {"tokenizer": "bpe"}}
