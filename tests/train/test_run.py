"""The run directory: what lies in it, and what is refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from tiny_task import tiny_recipe

from intbmoe.recipes import recipe_to_dict
from intbmoe.train import RunDirectory, find_runs
from intbmoe.train.environment import describe_environment, git_state
from intbmoe.train.errors import DamagedFileError, RunConflictError, TrainingError
from intbmoe.train.lock import RunLock
from intbmoe.train.run import MetricsFile, differing_keys


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


def test_another_configuration_is_refused_by_the_keys_that_differ(run):
    with pytest.raises(RunConflictError) as caught:
        run.claim(tiny_recipe(lr=0.5, betas=(0.8, 0.9)))
    message = str(caught.value)
    assert "train.lr: 0.01 there, 0.5 now" in message
    assert "train.betas" in message
    assert "train.batch" not in message
    assert "moe.label" in message
    assert run.recipe == tiny_recipe()


def test_what_computes_nothing_else_may_change(run):
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
    with pytest.raises(DamagedFileError, match="the checkpoint knows of 9999"):
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
    assert [found.path for found in find_runs(tmp_path)] == [run.path]


def test_two_processes_do_not_train_into_one_directory(tmp_path):
    code = (
        "import sys, pathlib\nfrom intbmoe.train.lock import RunLock\n"
        "with RunLock(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline().strip() == "held"
    with pytest.raises(RunConflictError, match=f"process {holder.pid} trains"), RunLock(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with RunLock(tmp_path):  # the dead holder's lock is gone with it
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(RunConflictError, match="this process"), RunLock(tmp_path):
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
