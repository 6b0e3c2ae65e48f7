"""Two gloo ranks train as one process does, replicated (DDP) and sharded (FSDP2)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_task import assert_close_metrics, still, tiny_recipe

from intbmoe.train import RunDirectory, train
from intbmoe.train.files import read_tensors
from ranks import run_ranks

METHODS = ("deepseek", "remoe", "dynmoe", "mass", "intbmoe", "switch")


def recipe_of(method):
    return still(tiny_recipe(method, log_every=1, eval_every=0.6))


def train_on_ranks(rank, world, root):
    """All trainings in one start: replicated, sharded, sharded with an interruption, and what refuses to be sharded."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), OMP_NUM_THREADS="1"
    )
    for method in METHODS:
        train(recipe_of(method), root / "replicated", quiet=True)
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    train(recipe_of("intbmoe"), root / "sharded", quiet=True)
    interrupted(recipe_of("intbmoe"), root / "resumed")
    refusals = {}
    for method in ("dynmoe", "mass"):
        try:
            train(recipe_of(method), root / "refused", quiet=True)
        except RuntimeError as error:
            refusals[method] = str(error)
    return refusals


def interrupted(recipe, root):
    """Fail after step 7, with a checkpoint of step 6, and go on."""
    from intbmoe.train.step import Stepper

    take = Stepper.take

    def fail(self, step, *arguments):
        if step == 8:
            raise InterruptedError
        return take(self, step, *arguments)

    Stepper.take = fail
    try:
        train(recipe, root, quiet=True)
    except InterruptedError:
        pass
    finally:
        Stepper.take = take
    train(recipe, root, quiet=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    refusals = run_ranks(2, train_on_ranks, root)
    return root, refusals


def assert_close_models(run, expected):
    theirs = read_tensors(expected.model_path)
    ours = read_tensors(run.model_path)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_follow_the_single_process(runs, tmp_path, method):
    recipe = recipe_of(method)
    single = train(recipe, tmp_path, quiet=True)
    both = RunDirectory.of(recipe, runs[0] / "replicated")
    assert_close_metrics(both, single)
    assert_close_models(both, single)
    assert both.result["params"] == single.result["params"]


def test_shards_train_as_replicas_do(runs):
    recipe = recipe_of("intbmoe")
    replicated, sharded = (RunDirectory.of(recipe, runs[0] / kind) for kind in ("replicated", "sharded"))
    assert_close_metrics(sharded, replicated)
    assert_close_models(sharded, replicated)


def test_shards_resume_bit_for_bit(runs):
    recipe = recipe_of("intbmoe")
    straight, resumed = (RunDirectory.of(recipe, runs[0] / kind) for kind in ("sharded", "resumed"))
    for name in ("model.safetensors", "metrics.jsonl", "checkpoints/step-00000010/optimizer.safetensors"):
        assert (straight.path / name).read_bytes() == (resumed.path / name).read_bytes(), name


def test_growing_pools_refuse_to_be_sharded(runs):
    for refusals in runs[1]:
        assert set(refusals) == {"dynmoe", "mass"}
        assert all("which is sharded" in message for message in refusals.values())


@pytest.mark.slow
def test_started_by_torchrun(tmp_path):
    code = (
        "import sys, torch; torch.set_num_threads(1)\nfrom test_distribution import recipe_of\n"
        "from intbmoe.train import train\ntrain(recipe_of('deepseek'), sys.argv[1])\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    here = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launch, script, tmp_path / "two"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 10/10  test") == 1
    single = train(recipe_of("deepseek"), tmp_path / "one", quiet=True)
    assert_close_metrics(RunDirectory.of(recipe_of("deepseek"), tmp_path / "two"), single)


@pytest.mark.slow
def test_a_signal_to_the_group_of_torchrun_saves(tmp_path):
    """A rank gets it twice: with its group, and from the launcher, which passes its own on."""
    code = (
        "import os, signal, sys, torch; torch.set_num_threads(1)\nfrom tiny_task import tiny_recipe\n"
        "from intbmoe.train import train\nfrom intbmoe.train.step import Stepper\ntake = Stepper.take\n"
        "def signalled(self, step, *arguments):\n"
        "    if step == 4 and os.environ['RANK'] == '1':\n"
        "        os.killpg(0, signal.SIGTERM)\n        os.kill(os.getppid(), signal.SIGTERM)\n"
        "    return take(self, step, *arguments)\n"
        "Stepper.take = signalled\ntrain(tiny_recipe(workers=1), sys.argv[1])\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    here = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, script, tmp_path / "two"], env=environment, capture_output=True, text=True, start_new_session=True
    )
    assert done.returncode != 0
    run = RunDirectory.of(tiny_recipe(), tmp_path / "two")
    stopped = sorted((run.path / "checkpoints").iterdir())[-1]
    assert stopped.name in ("step-00000004", "step-00000005"), done.stderr
    assert "the same command goes on from there" in done.stderr
