"""After SIGKILL at any moment, the run resumes as if nothing had happened, bit for bit."""

import multiprocessing
import os
import random
import signal

import pytest
import torch
from tiny_task import TinyTask, tiny_recipe

from intbmoe.train import resume as checkpoint_module
from intbmoe.train import run as run_module
from intbmoe.train import train
from intbmoe.train.files import read_tensors
from intbmoe.train.metrics import MetricsFile
from intbmoe.train.run import RunDirectory
from intbmoe.train.step import Stepper
from thinned import thinned

STATEFUL = ("deepseek", "remoe", "dynmoe", "mass")
FORK = multiprocessing.get_context("fork")  # the child already has everything imported, which would take seconds


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(recipe, root, owner, name, call):
    """Train in a child that kills itself at the ``call``-th call of ``owner.name``, halfway through if it writes."""
    original, calls = getattr(owner, name), iter(range(10**6))

    def watched(*arguments):
        if next(calls) == call:
            if name == "write_bytes":
                arguments[0].write_bytes(arguments[1][: len(arguments[1]) // 2])
            die()
        return original(*arguments)

    setattr(owner, name, watched)
    train(recipe, root, quiet=True)


def run_child(target, *arguments, kill_after=None):
    child = FORK.Process(target=target, args=arguments)
    child.start()
    child.join(kill_after)
    if kill_after is not None:
        child.kill()
    child.join()
    return child.exitcode


def last_checkpoint(run):
    return sorted((run.path / "checkpoints").iterdir())[-1]


def assert_same(run, straight):
    for name in ("model.safetensors", "metrics.jsonl", "loads.jsonl"):
        assert (run.path / name).read_bytes() == (straight.path / name).read_bytes(), name
    ours, theirs = last_checkpoint(run), last_checkpoint(straight)
    assert ours.name == theirs.name
    for name in ("model.safetensors", "optimizer.safetensors", "statistics.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert [entry.name for entry in run.path.rglob(".*")] == []


MOMENTS = [
    (Stepper, "take", 4),  # in the second step after a checkpoint
    (checkpoint_module, "write_bytes", 6),  # while the second checkpoint's tensors are written
    (checkpoint_module, "remove_folder", 0),  # before an old checkpoint is removed
    (MetricsFile, "append", 2),
    (run_module, "replace_file", 1),
]
"""(owner, name, number of the call) at which the child dies."""


# The other methods also keep their state between steps in buffers.
@pytest.mark.parametrize("method", thinned([*STATEFUL, "switch"], {"mass", "deepseek"}.__contains__))
def test_killed_three_times_and_the_same_bit_for_bit(tmp_path, method):
    recipe = tiny_recipe(method, keep_checkpoints=1, device_batch=4)
    straight = train(recipe, tmp_path / "straight", quiet=True)
    for moment in MOMENTS[:3]:
        assert run_child(train_and_die, recipe, tmp_path / "killed", *moment) == -signal.SIGKILL
    assert_same(train(recipe, tmp_path / "killed", quiet=True), straight)


def test_state_moves_in_the_runs_compared(tmp_path):
    """Otherwise the test above would show nothing."""
    for method, buffer in {"deepseek": "bias", "remoe": "strength", "dynmoe": "active", "mass": "active"}.items():
        recipe = tiny_recipe(method)
        trained = read_tensors(train(recipe, tmp_path, quiet=True).model_path)
        start = TinyTask(recipe).make_model().state_dict()
        names = [name for name in start if name.endswith(buffer)]
        assert any(not torch.equal(start[name], trained[name]) for name in names), method


@pytest.mark.parametrize("moment", MOMENTS[3:], ids=lambda moment: moment[1])
def test_killed_while_writing_the_smaller_files(tmp_path, moment):
    recipe = tiny_recipe()
    straight = train(recipe, tmp_path / "straight", quiet=True)
    assert run_child(train_and_die, recipe, tmp_path / "killed", *moment) == -signal.SIGKILL
    assert_same(train(recipe, tmp_path / "killed", quiet=True), straight)


def test_killed_between_the_last_step_and_the_result(tmp_path):
    recipe = tiny_recipe()
    straight = train(recipe, tmp_path / "straight", quiet=True)
    assert run_child(train_and_die, recipe, tmp_path / "killed", RunDirectory, "write", 2) == -signal.SIGKILL
    run = train(recipe, tmp_path / "killed", quiet=True)
    assert_same(run, straight)
    assert run.result["valid"] == straight.result["valid"]


def test_a_damaged_checkpoint_costs_steps_not_the_result(tmp_path, capsys):
    recipe = tiny_recipe()
    straight = train(recipe, tmp_path / "straight", quiet=True)
    run_child(train_and_die, recipe, tmp_path / "killed", Stepper, "take", 7)
    run = RunDirectory.of(recipe, tmp_path / "killed")
    damaged = last_checkpoint(run) / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert_same(train(recipe, tmp_path / "killed", quiet=True), straight)
    told = capsys.readouterr().err
    assert "step-00000006/optimizer.safetensors" in told
    assert "older checkpoint of step 3" in told


@pytest.mark.slow
@pytest.mark.parametrize("method", [*STATEFUL, "intbmoe"])
def test_twenty_kills_at_random_moments(tmp_path, method):
    recipe = tiny_recipe(method, epochs=40.0, checkpoint_every=2, workers=1)
    straight = train(recipe, tmp_path / "straight", quiet=True)
    moments = random.Random(method)
    kills = 0
    for _ in range(20):
        code = run_child(train, recipe, tmp_path / "killed", True, kill_after=moments.uniform(0.1, 0.5))
        kills += code == -signal.SIGKILL
    run = train(recipe, tmp_path / "killed", quiet=True)
    assert_same(run, straight)
    assert kills >= 10, f"only {kills} of 20 kills met a running training: make the run longer"
