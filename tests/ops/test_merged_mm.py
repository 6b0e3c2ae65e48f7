"""Neither chunks nor spread inputs change the product or its gradients, and both keep little memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import intbmoe.ops.merged_mm as package
from intbmoe.ops.merged_mm import chunked, merged_mm, naive, spread

FORMS = pytest.mark.parametrize("form", [chunked, spread], ids=["chunked", "spread"])


def inputs(groups, dtype=torch.float64, size=3):
    z = torch.randn(groups, size, 4, dtype=dtype, requires_grad=True)
    a = torch.randn(groups, 2, dtype=torch.promote_types(dtype, torch.float32)).softmax(-1).requires_grad_()
    return z, a, torch.randn(2, 4, 6, dtype=dtype, requires_grad=True)


def test_by_hand():
    z = torch.tensor([[[1.0, 10.0]], [[1.0, 10.0]]])
    weight = torch.tensor([[[2.0], [0.0]], [[0.0], [4.0]]])
    a = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert naive.merged_mm(z, a, weight).flatten().tolist() == [2.0, 1.0 + 20.0]


@FORMS
@pytest.mark.parametrize(("groups", "size"), [(0, 3), (1, 3), (2, 3), (5, 3), (6, 3), (3, 0), (3, 1)])
def test_chunks_are_the_whole_with_gradients(form, groups, size):
    leaves = inputs(groups, size=size)
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
    """Such as a transposed batch, whose strides do not allow a view of the result."""
    z, a, weight = inputs(5)
    turned = torch.randn(4, 3, 5, dtype=torch.float64).permute(2, 1, 0)
    torch.testing.assert_close(form.merged_mm(turned, a, weight, limit=2), naive.merged_mm(turned, a, weight))
    turned = weight.mT.contiguous().mT.requires_grad_()
    torch.testing.assert_close(form.merged_mm(z, a, turned, limit=2), naive.merged_mm(z, a, weight))
    form.merged_mm(z, a, turned, limit=2).sum().backward()


@FORMS
def test_narrow_types_are_as_near_to_the_truth_as_the_specification(form):
    """Each form rounds to bfloat16 at other points, so all are compared with float64 on the same inputs."""
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


@FORMS
def test_gradients_of_many_outputs_come_at_once(form):
    """For batched gradients, torch supports ``reshape`` but not ``flatten``."""
    leaves, upstream = inputs(5), torch.randn(7, 5, 3, 6, dtype=torch.float64)
    ways = (lambda *leaves: form.merged_mm(*leaves, limit=2), naive.merged_mm)
    found, expected = (torch.autograd.grad(way(*leaves), leaves, upstream, is_grads_batched=True) for way in ways)
    torch.testing.assert_close(found, expected)


@FORMS
def test_frozen_matrices_get_no_gradient_and_change_no_other(form):
    z, a, weight = inputs(5)
    upstream = torch.randn(5, 3, 6, dtype=torch.float64)
    expected = torch.autograd.grad(form.merged_mm(z, a, weight, limit=2), (z, a), upstream)
    found = torch.autograd.grad(form.merged_mm(z, a, weight.detach(), limit=2), (z, a), upstream)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "form"),
    [
        ("cpu", torch.float32, 1, spread),
        ("cpu", torch.bfloat16, 2, chunked),
        ("cuda", torch.bfloat16, 512 // 8, spread),
        ("cuda", torch.bfloat16, 512 // 8 + 1, chunked),
        ("cuda", torch.float32, 64 // 8, spread),
        ("cuda", torch.float64, 64 // 8 + 1, chunked),
    ],
)
def test_small_groups_build_no_matrix_and_large_ones_do(monkeypatch, device, dtype, size, form):
    called = []
    for one in (chunked, spread):
        monkeypatch.setattr(one, "merged_mm", lambda z, a, weight, limit, one=one: called.append(one))
    with FakeTensorMode():
        z, weight = torch.empty(2, size, 4, device=device, dtype=dtype), torch.empty(8, 4, 6, device=device)
        merged_mm(z, torch.empty(2, 8, device=device), weight)
    assert called == [form]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_exported_programs_take_any_number_and_size_of_groups(monkeypatch, size):
    """Otherwise the number of chunks and the form would be fixed at the example's size."""
    monkeypatch.setattr(package, "MAX_NUMBERS_IN_CACHE", 2 * 4 * 6)

    class Layer(torch.nn.Module):
        def forward(self, z, a, weight):
            return merged_mm(z, a, weight)

    groups, free = torch.export.Dim("groups", max=64), torch.export.Dim("size", max=64)
    shapes = ({0: groups, 1: free} if size > 1 else {0: groups}, {0: groups}, None)
    program = torch.export.export(Layer(), inputs(3, size=size), dynamic_shapes=shapes)
    for groups, other in ((2, size), (40, size), *([(5, 2), (5, 40)] if size > 1 else [])):
        leaves = inputs(groups, size=other)
        torch.testing.assert_close(program.module()(*leaves), naive.merged_mm(*leaves))


TRANSFORMS = {
    "grad": lambda f, z, a, w: torch.func.grad(lambda w: f(z, a, w).square().sum())(w),
    "jvp": lambda f, z, a, w: torch.func.jvp(f, (z, a, w), (z, a, w))[1],
    "vmap": lambda f, z, a, w: torch.func.vmap(f, (0, None, None))(torch.stack([z, -z]), a, w),
    "jacrev": lambda f, z, a, w: torch.func.jacrev(f, 1)(z, a, w),
    "hessian": lambda f, z, a, w: torch.func.hessian(lambda a: f(z, a, w).square().sum())(a),
}


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_function_transforms_see_through_it(transform, size):
    leaves = [leaf.detach() for leaf in inputs(3, size=size)]
    torch.testing.assert_close(transform(merged_mm, *leaves), transform(naive.merged_mm, *leaves))


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
    """One row is spread, eight are not: both stay within the limit, and neither keeps what it built."""
    monkeypatch.setattr(package, "MAX_NUMBERS_IN_CACHE", 2**12)
    width, groups = 16, 512
    z = torch.randn(groups, size, width, requires_grad=True)
    a, weight = torch.rand(groups, 2, requires_grad=True), torch.randn(2, width, width, requires_grad=True)
    kept = []
    with _Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        merged_mm(z, a, weight).sum().backward()
    assert largest.numel == max(2**12, z.numel())
    assert all(tensor.numel() <= max(z.numel(), weight.numel()) for tensor in kept)
