"""A training from its recipe to its result, and the ways it can end."""

import copy
import errno
import math
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from tiny_task import TinyTask, assert_close_metrics, still, tiny_recipe
from torch import nn

import intbmoe
from intbmoe.tasks import DataError
from intbmoe.train import RunDirectory, build, evaluate, load, train
from intbmoe.train import resume as checkpoint_module
from intbmoe.train.distribution import compile_in_place
from intbmoe.train.errors import (
    DamagedFileError,
    DiskFullError,
    NonFiniteLossError,
    OutOfMemoryError,
    RunConflictError,
    TrainingError,
    TrainingInterrupted,
)
from intbmoe.train.files import read_tensors
from intbmoe.train.step import Stepper
from lock_holder import locked_by_another
from thinned import thinned


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tiny_recipe("intbmoe", epochs=8.0), tmp_path_factory.mktemp("runs"), quiet=True)


def test_a_finished_run_has_everything(finished):
    assert finished.finished
    result = finished.result
    assert (result["steps"], result["epochs"], result["examples"]) == (40, 8.0, 320)
    assert result["params"] == sum(p.numel() for p in TinyTask(finished.recipe).make_model().parameters())
    names = {entry.name.split(".")[0] for entry in finished.path.iterdir()}
    assert names >= {"config", "environment", "metrics", "model", "done", "checkpoints", "events"}
    assert not any(entry.suffix in (".pt", ".pkl", ".bin") for entry in finished.path.rglob("*"))


def test_metrics_have_a_line_for_each_window_and_evaluation(finished):
    rows = finished.metrics()
    assert [row["step"] for row in rows if row["split"] == "train"] == list(range(2, 41, 2))
    assert [row["epoch"] for row in rows if row["split"] == "valid"] == list(range(1, 9))
    assert [row["step"] for row in rows if row["split"] == "test"] == [40]
    first = rows[0]
    assert first.keys() >= {"loss", "aux", "grad_norm", "lr", "utilisation", "worst_case", "entropy", "dropped"}
    assert {k: v for k, v in rows[-1].items() if k not in ("step", "epoch", "split")} == finished.result["test"]


def test_it_learns(finished):
    losses = [row["loss"] for row in finished.metrics() if row["split"] == "train"]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert finished.result["test"]["accuracy"] > 0.6


def test_the_model_comes_back(finished):
    before = torch.get_rng_state()
    model = intbmoe.load(finished.path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert evaluate(finished) == finished.result["test"]
    assert evaluate(finished, "valid") == finished.result["valid"]
    with pytest.raises(ValueError, match="split='train'"):
        evaluate(finished, "train")


def test_a_finished_run_is_not_trained_again(finished):
    stamp = (finished.path / "done.json").stat().st_mtime_ns
    again = train(finished.recipe, finished.path.parents[2], quiet=True)
    assert again.path == finished.path
    assert (finished.path / "done.json").stat().st_mtime_ns == stamp
    with pytest.raises(RunConflictError, match=r"train\.lr"):
        train(replace(finished.recipe, train=replace(finished.recipe.train, lr=1.0)), finished.path.parents[2])


def test_a_start_that_failed_on_its_data_is_corrected_by_the_next(tmp_path, monkeypatch):
    def fail(self, name):
        raise DataError("set data.path")

    with monkeypatch.context() as patch:
        patch.setattr(TinyTask, "split", fail)
        with pytest.raises(DataError):
            train(tiny_recipe(steps=1), tmp_path, quiet=True)
    corrected = tiny_recipe(steps=1, data={"examples": 24})
    assert train(corrected, tmp_path, quiet=True).recipe == corrected


def test_a_run_that_another_process_has_is_waited_for(tmp_path):
    recipe = tiny_recipe(steps=1)
    run = RunDirectory.of(recipe, tmp_path)

    def look():
        time.sleep(0.3)  # time enough for a process that does not wait to begin
        (run.path / "seen by the other").write_text("begun" if run.config_path.is_file() else "nothing")

    def wait(message):
        assert message == f"process {holder.pid} is training in {run.path}: waiting for it to end"
        assert not run.begun
        let_go.set()

    with locked_by_another(run.path, look) as (holder, let_go):
        with pytest.raises(RunConflictError, match=f"kill {holder.pid}"):
            train(recipe, tmp_path, quiet=True)
        train(recipe, tmp_path, quiet=True, wait=wait)
    assert (run.path / "seen by the other").read_text() == "nothing"
    assert run.finished


def test_an_altered_model_is_refused(tmp_path):
    run = train(tiny_recipe(epochs=0.4), tmp_path, quiet=True)
    content = bytearray(run.model_path.read_bytes())
    content[-1] ^= 1
    run.model_path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors"):
        load(run)


def test_what_is_loaded_late_is_still_public():
    assert "load" in intbmoe.__all__
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        intbmoe.lode  # noqa: B018


@pytest.mark.parametrize("method", thinned(["switch", "intbmoe", "remoe", "mass"], {"intbmoe", "mass"}.__contains__))
def test_accumulation_changes_nothing_but_rounding(tmp_path, method):
    """In float64, so that 1e-9 is a thousand roundings; auxiliary losses, nonlinear in the micro-batch, are off."""
    recipe = still(tiny_recipe(method, log_every=1))
    off = {"switch": {"balance": 0.0}, "remoe": {"sparsity_strength": 1e-30, "sparsity_rate": 1.0 + 1e-6}}
    recipe = replace(recipe, moe=replace(recipe.moe, options=recipe.moe.options | off.get(method, {})))
    whole = train(recipe, tmp_path / "whole", quiet=True)
    parts = train(replace(recipe, train=replace(recipe.train, device_batch=2)), tmp_path / "parts", quiet=True)
    assert_close_metrics(parts, whole)
    weights = read_tensors(whole.model_path)
    for name, value in read_tensors(parts.model_path).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-7, atol=1e-9, msg=name)


def test_workers_change_nothing(tmp_path):
    runs = [train(tiny_recipe(workers=w, epochs=1.0), tmp_path / str(w), quiet=True) for w in (0, 2)]
    assert runs[0].model_path.read_bytes() == runs[1].model_path.read_bytes()
    assert runs[0].metrics_path.read_bytes() == runs[1].metrics_path.read_bytes()


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path):
    recipe = tiny_recipe(data={"poison": 17}, checkpoint_every=1)
    with pytest.raises(NonFiniteLossError, match=r"step \d+: the loss is nan") as caught:
        train(recipe, tmp_path, quiet=True)
    step = int(str(caught.value).split()[1].rstrip(":"))
    folders = sorted((tmp_path / "tiny/switch/0/checkpoints").iterdir())
    assert [int(folder.name[5:]) for folder in folders][-1:] == ([step - 1] if step > 1 else [])
    for folder in folders:
        assert all(v.isfinite().all() for v in read_tensors(folder / "model.safetensors").values())


@pytest.mark.parametrize(("settings", "fix"), [({"batch": 8}, "4"), ({"batch": 8, "device_batch": 2}, "1")])
def test_missing_memory_names_a_smaller_batch(tmp_path, monkeypatch, settings, fix):
    def take(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(Stepper, "take", take)
    said = rf"is out of memory with \d examples at a time: try --train\.device-batch {fix}, .*allocate 2\.00 GiB"
    with pytest.raises(OutOfMemoryError, match=said):
        train(tiny_recipe(**settings), tmp_path, quiet=True)


def test_a_full_disk_ends_with_a_message_and_the_run_goes_on_later(tmp_path, monkeypatch):
    straight = train(tiny_recipe(), tmp_path / "straight", quiet=True)
    calls = iter(range(100))
    write = checkpoint_module.write_bytes

    def fail(path, content):
        if next(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_bytes", fail)
        with pytest.raises(DiskFullError, match="free some space"):
            train(tiny_recipe(), tmp_path / "full", quiet=True)
    run = train(tiny_recipe(), tmp_path / "full", quiet=True)
    assert run.model_path.read_bytes() == straight.model_path.read_bytes()
    assert run.metrics_path.read_bytes() == straight.metrics_path.read_bytes()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, monkeypatch, capsys, signum, code):
    straight = train(tiny_recipe(), tmp_path / "straight", quiet=True)
    take = Stepper.take

    def take_and_signal(self, step, *arguments):
        if step == 4:
            os.kill(os.getpid(), signum)
        return take(self, step, *arguments)

    handler = signal.getsignal(signum)
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "take", take_and_signal)
        with pytest.raises(TrainingInterrupted) as caught:
            train(tiny_recipe(), tmp_path / "stopped")
    assert caught.value.code == code
    assert signal.getsignal(signum) is handler
    assert "the same command resumes" in capsys.readouterr().err
    assert (tmp_path / "stopped/tiny/switch/0/checkpoints/step-00000005").is_dir()
    run = train(tiny_recipe(), tmp_path / "stopped", quiet=True)
    assert run.model_path.read_bytes() == straight.model_path.read_bytes()
    assert run.metrics_path.read_bytes() == straight.metrics_path.read_bytes()


def test_bfloat16_trains_and_keeps_its_weights_wide(tmp_path):
    run = train(tiny_recipe("intbmoe", precision="bfloat16"), tmp_path, quiet=True)
    assert all(v.dtype == torch.float32 for v in read_tensors(run.model_path).values() if v.is_floating_point())
    assert all(math.isfinite(row["loss"]) for row in run.metrics())


@pytest.mark.parametrize("slow", [True, False])
def test_bfloat16_where_it_is_slow_is_told_with_the_remedy(tmp_path, monkeypatch, capsys, slow):
    monkeypatch.setattr(build, "bfloat16_is_slow", lambda device: slow)
    for precision in ("float32", "bfloat16"):
        train(tiny_recipe(precision=precision, steps=1), tmp_path / precision, quiet=True)
        said = "--train.precision float32" in capsys.readouterr().err
        assert said == (slow and precision == "bfloat16")


def test_torch_is_left_as_it_was_found(tmp_path):
    assert not torch.are_deterministic_algorithms_enabled()
    train(tiny_recipe(epochs=0.4), tmp_path, quiet=True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_fsdp_needs_ranks_and_version_two(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(TrainingError, match="FSDP_VERSION=2"):
        train(tiny_recipe(), tmp_path)
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(TrainingError, match="torchrun"):
        train(tiny_recipe(), tmp_path)


def test_blocks_are_compiled_where_all_mixtures_lie_in_such(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    deep = TinyTask(tiny_recipe()).make_model()
    compile_in_place(deep)
    assert compiled == list(deep.blocks)
    compiled.clear()
    alone = intbmoe.IntBMoE(8, 12, experts=2)  # also has lists of modules, but they are not Transformer blocks
    compile_in_place(alone)
    assert compiled == [alone]


def test_compiled_backwards_keep_float32_where_the_layer_has_it(monkeypatch):
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))
    ordinary = intbmoe.IntBMoE(16, 24, experts=4)
    compiled = copy.deepcopy(ordinary)
    x, probe = torch.randn(2, 3, 8, 16).unbind()
    with torch._functorch.config.patch(backward_pass_autocast="same_as_forward"):  # torch's default, restored later
        compile_in_place(compiled)
        for layer in (ordinary, compiled):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = layer(x)
            (y * probe).sum().backward()
    for (name, a), b in zip(ordinary.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_compiled(tmp_path):
    runs = [train(still(tiny_recipe(compile=c)), tmp_path / str(c), quiet=True) for c in (False, True)]
    eager, compiled = (read_tensors(run.model_path) for run in runs)
    assert eager.keys() == compiled.keys()
    for name, value in compiled.items():
        torch.testing.assert_close(value, eager[name], rtol=1e-6, atol=1e-8, msg=name)
