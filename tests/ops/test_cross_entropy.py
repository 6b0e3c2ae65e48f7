"""The cross-entropy over a vocabulary: in parts, and by its kernels (``tests/interpreter.py``), against torch's."""

import pytest
import torch
import torch.nn.functional as F

from intbmoe.ops.backend import TRITON
from intbmoe.ops.cross_entropy import cross_entropy, naive
from interpreter import on_device

SIZES = [(5, 7), (1, 1), (3, 4096), (2, 9001), (0, 6)]  # tokens, vocabulary


def losses_and_gradient(loss, logits, targets):
    logits = logits.detach().clone().requires_grad_()
    losses = loss(logits, targets)
    probe = torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype, device=losses.device).view_as(losses)
    (losses * probe).sum().backward()
    return losses.detach(), logits.grad


def exact(logits, targets):
    return losses_and_gradient(lambda z, ids: F.cross_entropy(z, ids, reduction="none"), logits.double(), targets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [2**26, 44, 1])  # all at once, four tokens at a time, one
def test_in_parts_losses_and_gradients_are_the_same(limit, dtype, monkeypatch):
    monkeypatch.setattr(naive, "WIDE_SCORES", limit)
    logits, targets = torch.randn(3, 7, 11, dtype=torch.float64).to(dtype), torch.randint(11, (3, 7))
    losses, grad = losses_and_gradient(cross_entropy, logits, targets)
    assert losses.shape == targets.shape
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert grad.dtype == dtype
    expected = exact(logits.flatten(0, 1), targets.flatten())
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    torch.testing.assert_close(losses.flatten().double(), expected[0], rtol=close, atol=close)
    close = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(grad.flatten(0, 1).double(), expected[1], rtol=close, atol=close)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_give_torchs_losses_and_gradients(size, dtype, device):
    tokens, vocabulary = size
    torch.manual_seed(0)
    logits = (30 * torch.randn(tokens, vocabulary, dtype=torch.float64)).to(device, dtype)  # large: exp would overflow
    targets = torch.randint(vocabulary, (tokens,), device=device)
    losses, grad = losses_and_gradient(cross_entropy, logits, targets)
    assert (losses.dtype, grad.dtype) == (torch.float32, dtype)
    expected = exact(logits, targets)
    torch.testing.assert_close(losses.double(), expected[0], rtol=1e-5, atol=1e-5)
    close = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter truncates to bfloat16, a GPU rounds
    torch.testing.assert_close(grad.double(), expected[1], rtol=close, atol=1e-6)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@on_device
def test_scores_that_are_impossible_up_to_a_certain_place(device):
    logits, targets = torch.randn(3, 4500, device=device), torch.tensor([4200, 4499, 4100], device=device)
    logits[:, :4096] = float("-inf")
    losses, grad = losses_and_gradient(cross_entropy, logits, targets)
    expected = exact(logits, targets)
    torch.testing.assert_close(losses.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), expected[1], rtol=1e-5, atol=1e-6)


@on_device
def test_rows_that_are_not_in_one_piece(device):
    logits, targets = torch.randn(6, 4, device=device).t(), torch.randint(6, (8,), device=device)[::2]
    losses, grad = losses_and_gradient(cross_entropy, logits, targets)
    expected = exact(logits, targets)
    torch.testing.assert_close(losses.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), expected[1], rtol=1e-5, atol=1e-6)
