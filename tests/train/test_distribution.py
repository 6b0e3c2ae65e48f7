"""Two gloo ranks train as one process does: replicated (DDP), sharded (FSDP2), and with divided pools."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_task import assert_close_metrics, still, tiny_recipe
from torch import nn

import intbmoe
from intbmoe.registry import list_methods
from intbmoe.train import RunDirectory, train
from intbmoe.train.distribution import stacked_blocks
from intbmoe.train.files import read_tensors
from intbmoe.train.resume import CheckpointFolder
from ranks import run_ranks

METHODS = ("deepseek", "mass", "intbmoe")
MORE_METHODS = ("remoe", "dynmoe", "switch")


def recipe_of(method, **train):
    model = {"apart": method == "intbmoe"}
    return still(tiny_recipe(method, model=model, log_every=1, eval_every=0.6, **train))


def pools_recipe():
    """Two micro-batches per step, and clipping that always takes effect."""
    return recipe_of("intbmoe", parallel="pools", device_batch=2, clip=0.05)


def experts_recipe():
    """The same with divided experts, some of which are opened and closed during the run."""
    return recipe_of("dynmoe", parallel="experts", device_batch=2, clip=0.05)


def train_on_ranks(rank, world, root):
    """All trainings in one launch: replicated, sharded, pools, one interrupted, and models that cannot be sharded."""
    be_rank(rank, world)
    train_replicated(rank, world, root, METHODS)
    train(pools_recipe(), root / "pools", quiet=True)
    with stopping_at(8):  # after a checkpoint of step 6
        train(pools_recipe(), root / "resumed", quiet=True)
    if rank == 0:
        shutil.copytree(root / "resumed", root / "alone later")
    dist.barrier()
    train(pools_recipe(), root / "resumed", quiet=True)
    train(experts_recipe(), root / "experts", quiet=True)
    refusals = {"switch": refusal(recipe_of("switch", parallel="pools"), root)}
    refusals |= {"composed": refusal(recipe_of("intbmoe", parallel="experts"), root)}
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    train(recipe_of("intbmoe"), root / "sharded", quiet=True)
    return refusals | {method: refusal(recipe_of(method), root) for method in ("dynmoe", "mass")}


def train_replicated(rank, world, root, methods):
    be_rank(rank, world)
    for method in methods:
        train(recipe_of(method), root / "replicated", quiet=True)


def be_rank(rank, world):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), OMP_NUM_THREADS="1"
    )


def refusal(recipe, root):
    try:
        train(recipe, root / "refused", quiet=True)
    except RuntimeError as error:
        return str(error)
    return ""


@contextmanager
def stopping_at(last):
    """Fail before step ``last``."""
    from intbmoe.train.step import Stepper

    take = Stepper.take

    def fail(self, step, *arguments):
        if step == last:
            raise InterruptedError
        return take(self, step, *arguments)

    Stepper.take = fail
    try:
        yield
    except InterruptedError:
        pass
    finally:
        Stepper.take = take


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


def assert_follows_the_single_process(method, root, replicated):
    recipe = recipe_of(method)
    single = train(recipe, root, quiet=True)
    both = RunDirectory.of(recipe, replicated)
    assert_close_metrics(both, single)
    assert_close_models(both, single)
    assert both.result["params"] == single.result["params"]
    for name, values in both.outcomes().items():
        assert values == pytest.approx(single.outcomes()[name], rel=1e-6), name


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_follow_the_single_process(runs, tmp_path, method):
    assert_follows_the_single_process(method, tmp_path, runs[0] / "replicated")


@pytest.mark.slow
def test_two_ranks_follow_the_single_process_with_more_methods(tmp_path):
    """tests/methods/test_contract.py tests only the steps, for every method."""
    run_ranks(2, train_replicated, tmp_path, MORE_METHODS)
    for method in MORE_METHODS:
        assert_follows_the_single_process(method, tmp_path / "single", tmp_path / "replicated")


def test_shards_train_as_replicas_do(runs):
    recipe = recipe_of("intbmoe")
    replicated, sharded = (RunDirectory.of(recipe, runs[0] / kind) for kind in ("replicated", "sharded"))
    assert_close_metrics(sharded, replicated)
    assert_close_models(sharded, replicated)


@pytest.mark.parametrize("method", list_methods())
def test_the_parts_of_a_layer_are_no_blocks(method):
    """PLE, for one, uses the parameters of its listed parts without calling them, so they are no units of FSDP2."""
    layer = intbmoe.create(method, 8, **intbmoe.match_budget(method, 8, 8, experts=4))
    assert stacked_blocks(nn.Sequential(layer)) == []


def test_shared_out_pools_train_as_one_process_does(runs, tmp_path):
    single = train(replace_parallel(pools_recipe(), "ddp"), tmp_path, quiet=True)
    both = RunDirectory.of(pools_recipe(), runs[0] / "pools")
    assert_close_metrics(both, single)
    assert_close_models(both, single)
    assert both.result["params"] == single.result["params"]


def test_shared_out_experts_train_as_one_process_does(runs, tmp_path):
    single = train(replace_parallel(experts_recipe(), "ddp"), tmp_path, quiet=True)
    both = RunDirectory.of(experts_recipe(), runs[0] / "experts")
    assert_close_metrics(both, single)
    assert_close_models(both, single)
    assert both.result["params"] == single.result["params"]


def test_shards_resume_bit_for_bit(runs):
    straight, resumed = (RunDirectory.of(pools_recipe(), runs[0] / kind) for kind in ("pools", "resumed"))
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (straight.path / name).read_bytes() == (resumed.path / name).read_bytes(), name
    shards = sorted((straight.path / "checkpoints/step-00000010/shards").iterdir())
    assert len(shards) == 2
    for shard in shards:  # headers may list names in any order
        ours, theirs = read_tensors(shard), read_tensors(resumed.path / shard.relative_to(straight.path))
        assert ours.keys() == theirs.keys()
        assert any(name.startswith("optimizer/") and name.endswith("/exp_avg") for name in ours)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_one_process_goes_on_with_what_two_ranks_began(runs):
    straight, begun = (RunDirectory.of(pools_recipe(), runs[0] / kind) for kind in ("pools", "alone later"))
    shards = begun.path / "checkpoints/step-00000006/shards"
    assert [path.suffix for path in shards.iterdir()] == [".safetensors"] * 2  # nothing is pickled
    assert not begun.finished
    assert_close_models(train(pools_recipe(), runs[0] / "alone later", quiet=True), straight)


def test_a_damaged_shard_is_passed_over(runs, tmp_path):
    run = shutil.copytree(RunDirectory.of(pools_recipe(), runs[0] / "pools").path, tmp_path / "run")
    folder = CheckpointFolder(run / "checkpoints", keep=2)
    newest = folder.folder(10)
    shard = min((newest / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    messages = []
    assert folder.load_newest(messages.append).step == 9
    assert f"{shard} is missing, truncated or altered" in messages[0]


def replace_parallel(recipe, parallel):
    return replace(recipe, train=replace(recipe.train, parallel=parallel))


def test_what_cannot_be_sharded_says_so(runs):
    for refusals in runs[1]:
        assert "train.parallel='pools' does not fit this model, use 'ddp' or 'fsdp' or 'experts'" in refusals["switch"]
        assert (
            "train.parallel='experts' does not fit this model, use 'ddp' or 'fsdp' or 'pools'" in refusals["composed"]
        )
        assert "train.parallel='fsdp' does not fit this model, use 'ddp' or 'experts'" in refusals["dynmoe"]
        assert "train.parallel='fsdp' does not fit this model, use 'ddp': MASS" in refusals["mass"]


def go_on(rank, world, recipe, root, last):
    be_rank(rank, world)
    with stopping_at(last):
        train(recipe, root, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("make", [pools_recipe, experts_recipe])
def test_four_ranks_then_one_then_two(tmp_path, make):
    recipe = make()
    straight = train(replace_parallel(recipe, "ddp"), tmp_path / "straight", quiet=True)
    run_ranks(4, go_on, recipe, tmp_path, 4)
    run = RunDirectory.of(recipe, tmp_path)
    assert list((run.path / "checkpoints/step-00000003/shards").iterdir())
    with stopping_at(8):
        train(recipe, tmp_path, quiet=True)
    assert not (run.path / "checkpoints/step-00000006/shards").exists()  # a single process saves no shards
    run_ranks(2, go_on, recipe, tmp_path, 99)
    assert_close_models(run, straight)
    assert_close_metrics(run, straight)


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
    """A rank gets the signal twice: with its group, and from the launcher, which forwards it."""
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
    assert "the same command resumes from there" in done.stderr
