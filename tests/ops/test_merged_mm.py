"""Neither chunks nor spread inputs change the product or its gradients, and both keep little alive."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import intbmoe.ops.merged_mm as package
from intbmoe.ops.merged_mm import chunked, merged_mm, naive, spread

FORMS = pytest.mark.parametrize("form", [chunked, spread], ids=["chunked", "spread"])


def inputs(groups, dtype=torch.float64):
    z = torch.randn(groups, 3, 4, dtype=dtype, requires_grad=True)
    a = torch.randn(groups, 2, dtype=torch.promote_types(dtype, torch.float32)).softmax(-1).requires_grad_()
    return z, a, torch.randn(2, 4, 6, dtype=dtype, requires_grad=True)


def test_by_hand():
    z = torch.tensor([[[1.0, 10.0]], [[1.0, 10.0]]])
    weight = torch.tensor([[[2.0], [0.0]], [[0.0], [4.0]]])
    a = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert naive.merged_mm(z, a, weight).flatten().tolist() == [2.0, 1.0 + 20.0]


@FORMS
@pytest.mark.parametrize("groups", [0, 1, 2, 5, 6])
def test_chunks_are_the_whole_with_gradients(form, groups):
    leaves = inputs(groups)
    expected = naive.merged_mm(*leaves)
    found = form.merged_mm(*leaves, limit=2)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
    )


@FORMS
def test_gradients_agree_with_finite_differences(form):
    assert torch.autograd.gradcheck(lambda *leaves: form.merged_mm(*leaves, limit=2), inputs(5))


@FORMS
def test_inputs_may_be_views(form):
    """Of a batch that was transposed, say: strides that a view of the result would not survive."""
    _, a, weight = inputs(5)
    turned = torch.randn(4, 3, 5, dtype=torch.float64).permute(2, 1, 0)
    torch.testing.assert_close(form.merged_mm(turned, a, weight, limit=2), naive.merged_mm(turned, a, weight))


@FORMS
def test_narrow_types_are_as_near_to_the_truth_as_the_specification(form):
    """Each form rounds to bfloat16 elsewhere, so they are compared with what float64 says of the same inputs."""
    torch.manual_seed(0)
    z, a, weight = torch.randn(8, 16, 64), torch.randn(8, 4).softmax(-1), torch.randn(4, 64, 96) / 8
    leaves = (z.bfloat16().requires_grad_(), a.requires_grad_(), weight.requires_grad_())
    upstream = torch.randn(8, 16, 96).bfloat16()
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = _with_gradients(naive.merged_mm, wide, upstream.double())

    def errors(merged_mm):
        found = _with_gradients(merged_mm, leaves, upstream)
        return [float((one.double() - true).norm() / true.norm()) for one, true in zip(found, truth, strict=True)]

    found = errors(lambda *leaves: form.merged_mm(*leaves, limit=3))
    for error, allowed in zip(found, errors(naive.merged_mm), strict=True):
        assert error < 2 * allowed


def _with_gradients(merged_mm, leaves, upstream):
    y = merged_mm(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


@FORMS
def test_gradients_have_the_types_of_their_inputs(form):
    leaves = inputs(5, torch.bfloat16)
    found = form.merged_mm(*leaves, limit=2)
    assert found.dtype == torch.bfloat16
    for leaf, grad in zip(leaves, torch.autograd.grad(found.sum(), leaves), strict=True):
        assert grad.dtype == leaf.dtype


def test_small_groups_build_no_matrix_and_large_ones_do(monkeypatch):
    called = []
    for form in (chunked, spread):
        monkeypatch.setattr(form, "merged_mm", lambda z, a, weight, limit, form=form: called.append(form))
    for size in (1, package.SPREAD_INPUTS, package.SPREAD_INPUTS + 1):
        merged_mm(torch.zeros(2, size, 4), torch.zeros(2, 3), torch.zeros(3, 4, 6))
    assert called == [spread, spread, chunked]


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


@pytest.mark.parametrize("size", [1, 8])
def test_no_more_than_the_limit_is_ever_built_or_kept(monkeypatch, size):
    """One row is spread, eight are not: the limit holds for both, and neither keeps what it built."""
    monkeypatch.setitem(package.MAX_NUMBERS, "cpu", 2**12)
    width, groups = 16, 512
    z = torch.randn(groups, size, width, requires_grad=True)
    a, weight = torch.rand(groups, 2, requires_grad=True), torch.randn(2, width, width, requires_grad=True)
    kept = []
    with _Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        merged_mm(z, a, weight).sum().backward()
    assert largest.numel == max(2**12, z.numel())
    assert all(tensor.numel() <= max(z.numel(), weight.numel()) for tensor in kept)
