"""What can happen to a training from outside: signals to its group, kills, changed data and files, thread counts."""

import io
import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_task import TinyExamples, TinyTask, tiny_recipe

from intbmoe.compare.jobs import _Comparison
from intbmoe.compare.plan import Job, Plan
from intbmoe.files import digest, to_json
from intbmoe.recipes import load_recipe
from intbmoe.recipes.sets import Variant
from intbmoe.train import train
from intbmoe.train.errors import DamagedFileError, NonFiniteLossError, RunConflictError, TrainingError
from intbmoe.train.files import read_tensors
from intbmoe.train.origin import describe_data
from intbmoe.train.run import RunDirectory
from intbmoe.train.step import Stepper
from kill_points import FORK, chosen, operations


class GoneError(Exception):
    """Raised as if the machine had failed."""


def stop_at(monkeypatch, recipe, root, step):
    """Train and fail in ``step``."""
    take = Stepper.take

    def fail(self, number, *arguments):
        if number == step:
            raise GoneError
        return take(self, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "take", fail)
        with pytest.raises(GoneError):
            train(recipe, root, quiet=True)
    return RunDirectory.of(recipe, root)


def checkpoint(run):
    return sorted((run.path / "checkpoints").iterdir())[-1]


def edit_state(run, change):
    """Edit the state as an expert would, with a matching checksum."""
    path = checkpoint(run) / "state.json"
    state = json.loads(path.read_bytes())
    del state["checksum"]
    change(state)
    path.write_bytes(to_json({**state, "checksum": digest(to_json(state))}))


def assert_same(run, straight):
    for name in ("model.safetensors", "metrics.jsonl", "loads.jsonl"):
        assert (run.path / name).read_bytes() == (straight.path / name).read_bytes(), name
    assert [entry.name for entry in run.path.rglob(".*")] == []


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return train(tiny_recipe(), tmp_path_factory.mktemp("straight"), quiet=True)


# ---- signals --------------------------------------------------------------------------------------------------------


def train_and_signal_the_group(recipe, root, signum, times, where):
    """Train in a separate process group, whose workers get the signal too."""
    os.setpgid(0, 0)
    owner, name, call = where
    original, calls = getattr(owner, name), iter(range(10**6))

    def watched(*arguments):
        if next(calls) == call:
            for _ in range(times):
                os.killpg(0, signum)
        return original(*arguments)

    setattr(owner, name, watched)
    train(recipe, root, quiet=True)


@pytest.mark.parametrize(
    ("signum", "times", "where"),
    [
        pytest.param(signal.SIGTERM, 1, (Stepper, "take", 3), marks=pytest.mark.slow),  # also in the third
        (signal.SIGINT, 1, (Stepper, "take", 3)),
        (signal.SIGTERM, 2, (Stepper, "take", 3)),  # as ``timeout`` does
        (signal.SIGTERM, 1, (TinyTask, "evaluate_examples", 0)),  # during validation, with its workers
    ],
)
def test_a_signal_to_the_group_saves_with_workers(tmp_path, straight, signum, times, where):
    recipe = tiny_recipe(workers=2)
    child = FORK.Process(target=train_and_signal_the_group, args=(recipe, tmp_path, signum, times, where))
    child.start()
    child.join(60)
    assert child.exitcode == 128 + signum
    run = RunDirectory.of(recipe, tmp_path)
    assert checkpoint(run).name == ("step-00000005" if where[1] == "take" else "step-00000006")
    assert_same(train(recipe, tmp_path, quiet=True), straight)


# ---- kills at file operations ---------------------------------------------------------------------------------------


def kill_everywhere(tmp_path, straight, number):
    """Kill a training at each of ``number`` file operations (None: all); return how many operations it has."""
    recipe = tiny_recipe(checkpoint_every=5, keep_checkpoints=1)
    count, code = operations(tmp_path, lambda: train(recipe, tmp_path / "whole", quiet=True))
    assert code == 0
    for kill_at in chosen(count, number or count):
        root = tmp_path / f"killed-{kill_at}"
        for _ in range(2):  # the second kill hits a resumed run, unless nothing is left to do
            assert operations(root, lambda root=root: train(recipe, root, quiet=True), kill_at)[1] in (-9, 0)
        assert_same(train(recipe, root, quiet=True), straight)
    return count


def test_killed_at_chosen_file_operations_and_the_same_bit_for_bit(tmp_path, straight):
    kill_everywhere(tmp_path, straight, 4)


@pytest.mark.slow
def test_killed_at_every_file_operation_and_the_same_bit_for_bit(tmp_path, straight):
    count = kill_everywhere(tmp_path, straight, None)
    assert count > 60, count


# ---- divergence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lr", "train_settings", "said"),
    [
        (1e37, {"steps": 1}, r"step 1: on the valid split the loss is nan"),
        (1e37, {"steps": 3, "eval_every": 9.0, "checkpoint_every": 1}, r"step 2: the loss is nan"),
        (3e38, {"steps": 3, "eval_every": 9.0, "checkpoint_every": 1}, r"step 1: the weights .* are not finite"),
    ],
)
def test_divergence_is_one_message_wherever_it_is_seen(tmp_path, lr, train_settings, said):
    recipe = tiny_recipe(lr=lr, warmup=0.0, clip=None, **train_settings)
    for _ in range(2):  # a restart says the same
        with pytest.raises(NonFiniteLossError, match=said) as caught:
            train(recipe, tmp_path, quiet=True)
        for word in ("lower train.lr", "train.warmup", "--moe.label", str(RunDirectory.of(recipe, tmp_path).path)):
            assert word in str(caught.value)
    for folder in (tmp_path / "tiny/switch/0/checkpoints").glob("*"):
        assert all(value.isfinite().all() for value in read_tensors(folder / "model.safetensors").values())


# ---- threads --------------------------------------------------------------------------------------------------------


def threads_of(run):
    return [entry["threads"] for entry in json.loads((run.path / "environment.json").read_bytes())]


def test_a_run_keeps_its_threads(tmp_path, monkeypatch, capsys, straight):
    run = stop_at(monkeypatch, tiny_recipe(), tmp_path, 5)
    torch.set_num_threads(2)
    try:
        train(tiny_recipe(), tmp_path, quiet=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert threads_of(run) == [1, 1]
    assert "threads: 1 as before, not 2" in capsys.readouterr().err
    assert_same(run, straight)


def test_other_threads_are_taken_where_asked_for_and_said(tmp_path, monkeypatch, capsys):
    run = stop_at(monkeypatch, tiny_recipe(threads=1), tmp_path, 5)
    train(tiny_recipe(threads=2), tmp_path, quiet=True)
    assert threads_of(run) == [1, 2]
    assert "threads: 2, before 1: from here on sums round differently" in capsys.readouterr().err
    assert torch.get_num_threads() == 1


def test_a_comparison_goes_on_with_the_threads_it_began_with(tmp_path, monkeypatch):
    """Two runs share two cores; a single run left when the comparison resumes could use both."""
    recipe, runs = tiny_recipe(), [RunDirectory(tmp_path / name) for name in ("a", "b")]
    variant = Variant("switch", recipe.moe)
    plan = Plan(recipe, tmp_path, [Job(variant, recipe, run) for run in runs], {}, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr("intbmoe.compare.jobs.usable_cores", lambda: 2)
    console = Console(file=io.StringIO())
    assert _Comparison(plan, 1, 1, console).threads == 2
    runs[0].path.mkdir()
    runs[0].add_environment({"threads": 1})
    assert _Comparison(plan, 1, 1, console).threads == 1


# ---- data and checkpoints of another run ----------------------------------------------------------------------------


def check_ins(path, users=40, seed=0):
    random = np.random.default_rng(seed)
    lengths = np.random.default_rng(1).integers(4, 25, users)
    poi = np.concatenate([random.integers(0, 30, lengths.sum() - 1), [29]])
    times = np.concatenate([np.arange(length) for length in lengths])
    np.savez(path, user=np.repeat(np.arange(users), lengths), poi=poi, time=times)


def small_sequences(path):
    recipe = load_recipe("foursquare")
    model = replace(recipe.model, items=30, dim=8, depth=1, hidden=8, length=8, copy=False)
    training = replace(recipe.train, epochs=4.0, batch=16, checkpoint_every=2, warmup=0.0, workers=0)
    moe = replace(recipe.moe, name="switch", experts=2, options={})
    return replace(recipe, data=replace(recipe.data, path=str(path)), model=model, moe=moe, train=training)


def one_row(path):
    arrays = dict(np.load(path))
    arrays["poi"][7] = (arrays["poi"][7] + 1) % 29
    np.savez(path, **arrays)


def half_the_users(path):
    check_ins(path, users=20)


@pytest.mark.parametrize("change", [one_row, half_the_users])
def test_changed_data_is_refused_and_the_same_goes_on(tmp_path, monkeypatch, change):
    path = tmp_path / "check-ins.npz"
    check_ins(path)
    recipe = small_sequences(path)
    stop_at(monkeypatch, recipe, tmp_path / "runs", 4)
    before = path.read_bytes()
    change(path)
    with pytest.raises(RunConflictError, match=r"(?s)the data is not what .*files.*there.*put the data back.*--name"):
        train(recipe, tmp_path / "runs", quiet=True)
    path.unlink()
    path.write_bytes(before)
    assert train(recipe, tmp_path / "runs", quiet=True).finished


def test_changed_data_without_files_is_refused(tmp_path, monkeypatch):
    recipe = tiny_recipe()
    stop_at(monkeypatch, recipe, tmp_path, 5)
    real = TinyExamples.__init__

    def change(labels, noise):
        def changed(self, data, split):
            real(self, data, split)
            self.labels = (self.labels + labels) % 3
            self.x = self.x * noise

        return changed

    for changed, part in ((change(1, 1.0), "train.y"), (change(0, 1.1), "train.x.size")):
        with monkeypatch.context() as patch:
            patch.setattr(TinyExamples, "__init__", changed)
            with pytest.raises(RunConflictError, match=rf"(?s)the data is not .*{part}: .* there, .* now"):
                train(recipe, tmp_path, quiet=True)
    monkeypatch.setattr(TinyExamples, "__init__", change(0, 1.0001))  # another machine's rounding
    assert train(recipe, tmp_path, quiet=True).finished


def test_large_files_are_looked_at_in_pieces(tmp_path, monkeypatch):
    from intbmoe.train import origin

    monkeypatch.setattr(origin, "BYTES", 1024)
    monkeypatch.setattr(origin, "FILES", 4)
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.bin").write_bytes(bytes(range(256)) * 8)
    found = origin._describe_files(folder)
    assert (found["files"], found["bytes"]) == (8, 4 * 2048)
    (folder / ".DS_Store").touch()
    assert origin._describe_files(folder) == found
    (folder / "6.bin").write_bytes(bytes(range(256)) * 7 + bytes(256))  # the end of a file that is sampled
    assert origin._describe_files(folder)["content"] != found["content"]
    (folder / "8.bin").touch()
    assert origin._describe_files(folder)["files"] == 9


def test_a_checkpoint_of_another_learning_rate_is_refused(tmp_path, monkeypatch):
    other = stop_at(monkeypatch, tiny_recipe(lr=0.5), tmp_path / "other", 5)
    run = stop_at(monkeypatch, tiny_recipe(), tmp_path / "own", 5)
    own, stranger = checkpoint(run), checkpoint(other)
    own.rename(tmp_path / "kept")
    stranger.rename(own)
    with pytest.raises(RunConflictError, match=r"(?s)of another run.*train\.lr: 0\.5 there, 0\.01 now.*Remove"):
        train(tiny_recipe(), tmp_path / "own", quiet=True)


def test_a_checkpoint_of_old_goes_on_with_a_word(tmp_path, monkeypatch, capsys, straight):
    run = stop_at(monkeypatch, tiny_recipe(), tmp_path, 5)
    edit_state(run, lambda state: state.pop("origin"))
    assert_same(train(tiny_recipe(), tmp_path, quiet=True), straight)
    assert "is too old to name its settings and data" in capsys.readouterr().err


def test_data_that_is_moved_is_the_same(tmp_path):
    from intbmoe.tasks import make_task

    check_ins(tmp_path / "one.npz")
    found = describe_data(make_task(small_sequences(tmp_path / "one.npz")))
    (tmp_path / "one.npz").rename(tmp_path / "two.npz")
    assert describe_data(make_task(small_sequences(tmp_path / "two.npz"))) == found


# ---- files edited by hand -------------------------------------------------------------------------------------------

EDITS = {
    "window": lambda state: state.update(window=3),
    "no window": lambda state: state.pop("window"),
    "seconds": lambda state: state.pop("seconds"),
    "warned": lambda state: state.update(warned=[1]),
    "origin": lambda state: state.update(origin={"recipe": 1}),
    "recipe": lambda state: state["origin"].update(recipe={"task": "tiny"}),
    "data": lambda state: state["origin"].pop("data"),
    "sums": lambda state: state.pop("sha256"),
    "other sums": lambda state: state.update(sha256=7),
    "lengths": lambda state: state.update(metrics_length="all"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_state_edited_by_hand_is_a_message(tmp_path, monkeypatch, edit):
    run = stop_at(monkeypatch, tiny_recipe(), tmp_path, 5)
    edit_state(run, EDITS[edit])
    with pytest.raises(TrainingError, match=r"state\.json|checkpoint"):
        train(tiny_recipe(), tmp_path, quiet=True)


@pytest.mark.parametrize("content", ["7", '{"threads": 1}', "[3]", "["])
def test_an_environment_edited_by_hand_is_a_message(tmp_path, monkeypatch, content):
    run = stop_at(monkeypatch, tiny_recipe(), tmp_path, 5)
    (run.path / "environment.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"environment\.json"):
        train(tiny_recipe(), tmp_path, quiet=True)
