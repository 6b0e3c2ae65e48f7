"""Steps replayed from a CUDA graph end with the weights of ordinary ones, bit for bit."""

from unittest import mock

import pytest
import torch
from tiny_task import tiny_recipe
from torch import nn

from intbmoe.registry import list_methods
from intbmoe.train import train
from intbmoe.train.capture import CapturedBackward
from intbmoe.train.errors import CaptureError, TrainingError

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(TrainingError, match=r"train\.capture .*'cpu'.*turn it off"):
        train(tiny_recipe("intbmoe", capture=True), tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("message", "expected"),
    [("aten::nonzero is not permitted", CaptureError), ("CUDA out of memory. Tried to allocate", RuntimeError)],
)
def test_a_failed_capture_names_its_cause(message, expected):
    """Ending a failed capture raises an error of its own, which says nothing."""
    backward = mock.Mock(side_effect=[torch.zeros(1), torch.zeros(1), RuntimeError(message)])
    with mock.patch.object(torch, "cuda") as cuda:
        ended = RuntimeError("operation failed due to a previous error during capture")
        cuda.graph.return_value.__exit__.side_effect = ended
        with pytest.raises(RuntimeError, match=message) as raised:
            CapturedBackward(backward, nn.Linear(2, 2))({"x": torch.zeros(1)})
    assert type(raised.value) is expected


def weights(recipe, root):
    run = train(recipe, root, quiet=True)
    losses = [row["loss"] for row in run.metrics() if row["split"] == "train"]
    return (run.path / "model.safetensors").read_bytes(), losses, run.result["test"]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list_methods())
def test_captured_steps_are_the_ordinary_ones(name, precision, tmp_path):
    plain = weights(tiny_recipe(name, precision=precision), tmp_path / "plain")
    assert weights(tiny_recipe(name, precision=precision, capture=True), tmp_path / "captured") == plain


@pytest.mark.gpu
@needs_cuda
def test_accumulated_micro_batches_add_up(tmp_path):
    plain = weights(tiny_recipe("intbmoe", device_batch=2), tmp_path / "plain")
    assert weights(tiny_recipe("intbmoe", device_batch=2, capture=True), tmp_path / "captured") == plain


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["intbmoe", "vmoe", "soft"])
def test_compiled_steps_are_captured_too(name, tmp_path):
    compiled = weights(tiny_recipe(name, compile=True), tmp_path / "compiled")
    assert weights(tiny_recipe(name, compile=True, capture=True), tmp_path / "both") == compiled
