"""Chunks change neither the product nor its gradients, and keep few merged matrices alive."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from intbmoe.ops.merged_mm import MAX_MERGED, chunked, merged_mm, naive


def inputs(groups, dtype=torch.float64):
    z = torch.randn(groups, 3, 4, dtype=dtype, requires_grad=True)
    a = torch.randn(groups, 2, dtype=torch.promote_types(dtype, torch.float32)).softmax(-1).requires_grad_()
    return z, a, torch.randn(2, 4, 6, dtype=dtype, requires_grad=True)


def test_by_hand():
    z = torch.tensor([[[1.0, 10.0]], [[1.0, 10.0]]])
    weight = torch.tensor([[[2.0], [0.0]], [[0.0], [4.0]]])
    a = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert naive.merged_mm(z, a, weight).flatten().tolist() == [2.0, 1.0 + 20.0]


@pytest.mark.parametrize("groups", [0, 1, 2, 5, 6])
def test_chunks_are_the_whole_with_gradients(groups):
    leaves = inputs(groups)
    expected = naive.merged_mm(*leaves)
    found = chunked.merged_mm(*leaves, limit=2)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
    )


def test_gradients_agree_with_finite_differences():
    assert torch.autograd.gradcheck(lambda *leaves: chunked.merged_mm(*leaves, limit=2), inputs(5))


def test_narrow_types_merge_wide_and_keep_their_gradient_types():
    leaves = inputs(5, torch.bfloat16)
    found = merged_mm(*leaves)
    torch.testing.assert_close(found, naive.merged_mm(*leaves))
    for leaf, grad in zip(leaves, torch.autograd.grad(found.sum(), leaves), strict=True):
        assert grad.dtype == leaf.dtype


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_no_more_than_the_limit_is_ever_built_or_kept():
    width, groups = 16, 4 * MAX_MERGED
    z = torch.randn(groups, 1, width, requires_grad=True)
    a, weight = torch.rand(groups, 2, requires_grad=True), torch.randn(2, width, width, requires_grad=True)
    kept = []
    with _Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        merged_mm(z, a, weight).sum().backward()
    assert largest.numel == MAX_MERGED * width * width
    assert all(tensor.numel() <= max(z.numel(), weight.numel()) for tensor in kept)
