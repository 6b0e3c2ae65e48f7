"""Checkpoints survive kills, full disks and damage; nothing pickled is read."""

import errno
import json
import pickle

import pytest
import torch

from intbmoe.train import resume as module
from intbmoe.train.errors import DamagedFileError, DiskFullError
from intbmoe.train.files import read_tensors
from intbmoe.train.resume import Checkpoint, CheckpointFolder


def make(step):
    tensors = {
        "model": {"w": torch.full((3, 2), float(step)), "active": torch.tensor([True, False]), "n": torch.tensor(step)},
        "optimizer": {"w/exp_avg": torch.randn(3, 2)},
        "statistics": {},
    }
    return Checkpoint(step, tensors, {"seconds": 0.1 + step, "window": {"loss": 1 / 3}})


def refuse(message):
    raise AssertionError(f"unexpected message: {message}")


@pytest.fixture
def folder(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3):
        folder.save(make(step))
    return folder


def test_what_is_saved_comes_back_exactly(folder):
    saved = make(4)
    folder.save(saved)
    loaded = folder.load_newest(refuse)
    assert loaded.step == 4
    assert loaded.state["seconds"] == 4.1
    assert loaded.state["window"] == {"loss": 1 / 3}
    for part, tensors in saved.tensors.items():
        assert loaded.tensors[part].keys() == tensors.keys()
        assert all(torch.equal(loaded.tensors[part][name], value) for name, value in tensors.items())


def test_tied_and_strided_tensors_are_stored_whole(folder):
    w = torch.randn(4, 3)
    tensors = {"model": {"a": w, "b": w, "t": w.t(), "row": w[1]}, "optimizer": {}, "statistics": {}}
    folder.save(Checkpoint(5, tensors, {}))
    loaded = folder.load(5).tensors["model"]
    assert all(torch.equal(loaded[name], value) for name, value in tensors["model"].items())


def test_old_ones_are_removed_and_no_file_is_left_over(folder):
    assert folder.steps() == [2, 3]
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["step-00000002", "step-00000003"]


def test_nothing_there(tmp_path):
    assert CheckpointFolder(tmp_path / "none", keep=1).load_newest(refuse) is None


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


def alter(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(bytes(content))


def unlink(path):
    path.unlink()


def pickled(path):
    path.write_bytes(pickle.dumps({"w": 1}))


def torch_saved(path):
    torch.save({"w": torch.ones(2)}, path)


@pytest.mark.parametrize("damage", [truncate, alter, unlink, pickled, torch_saved])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "statistics.safetensors", "state.json"])
def test_a_damaged_file_is_named_and_the_one_before_is_taken(folder, damage, name):
    path = folder.folder(3) / name
    damage(path)
    with pytest.raises(DamagedFileError, match=name):
        folder.load(3)
    messages = []
    assert folder.load_newest(messages.append).step == 2
    assert str(path) in messages[0]
    assert "step 3" in messages[0]
    assert "older checkpoint of step 2" in messages[1]


def test_state_with_another_value_is_refused(folder):
    path = folder.folder(3) / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "seconds": 0.0}))
    with pytest.raises(DamagedFileError, match="altered"):
        folder.load(3)
    path.write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(DamagedFileError, match="format 99"):
        folder.load(3)


def test_all_damaged_is_an_error_not_a_fresh_start(folder):
    for step in folder.steps():
        truncate(folder.folder(step) / "model.safetensors")
    with pytest.raises(DamagedFileError, match="no checkpoint is intact"):
        folder.load_newest(lambda _: None)


def test_a_pickle_is_never_loaded_even_without_checksum(tmp_path):
    for make_file in (pickled, torch_saved):
        make_file(tmp_path / "model.safetensors")
        with pytest.raises(DamagedFileError, match="looks like a pickle"):
            read_tensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize("call", range(4))
def test_a_full_disk_leaves_the_earlier_ones(folder, monkeypatch, call):
    calls = iter(range(10))
    write = module.write_bytes

    def fail(path, content):
        if next(calls) == call:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(module, "write_bytes", fail)
    with pytest.raises(DiskFullError, match="no space left"):
        folder.save(make(4))
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["step-00000002", "step-00000003"]
    assert folder.load_newest(refuse).step == 3


def test_other_errors_of_the_disk_are_not_called_full(folder, monkeypatch):
    def fail(path, content):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "write_bytes", fail)
    with pytest.raises(OSError, match="Input/output"):
        folder.save(make(4))


def test_a_damaged_one_is_replaced_when_its_step_comes_again(folder):
    truncate(folder.folder(3) / "model.safetensors")
    folder.save(make(3))
    assert folder.load_newest(refuse).step == 3
