import copy

import pytest
import torch

from intbmoe import IntBMoE
from intbmoe.ops.compose import Coefficients, compose
from intbmoe.ops.composed_mm import Pooled, multiply


def tensors(gate):
    torch.manual_seed(0)
    second = torch.randn(4, 5) if gate else None
    ends = torch.tensor([3, 3, 8, 10], dtype=torch.int32)
    return torch.randn(10, 12), torch.randn(4, 5), second, torch.randn(5, 12, 8), ends


@pytest.mark.parametrize("gate", [True, False])
def test_it_is_composition_and_product(gate):
    *given, ends = tensors(gate)
    results = []
    for pooled in (True, False):
        z, value, second, pool = (None if t is None else t.clone().requires_grad_() for t in given)
        alpha = Coefficients(value, second, 0.3)
        weight = Pooled(alpha, pool) if pooled else compose(alpha, pool, torch.float32, "grouped")
        assert tuple(weight.shape) == (4, 12, 16 if gate else 8)
        y = multiply(z, weight, ends, "grouped", complete=True)
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
        results.append([y.detach(), *(t.grad for t in (z, value, second, pool) if t is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gate", [True, False])
def test_the_operation_is_sound(gate):
    z, value, second, pool, ends = tensors(gate)
    arguments = [None if t is None else t.requires_grad_() for t in (z, value, second, pool)]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.intbmoe.composed_mm, (*arguments, ends, 0.3, True, "grouped"), test_utils=tests)


def saved_bytes(layer, x):
    """Bytes that a forward keeps for backward, beyond parameters and input."""
    sizes, own = {}, {p.untyped_storage().data_ptr() for p in (*layer.parameters(), x)}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(sizes.values())


def test_a_layer_that_recomputes_keeps_no_composed_weights():
    layer = IntBMoE(16, 64, experts=4, blocks=8)
    other = copy.deepcopy(layer)
    other.recompute = True
    x = torch.randn(1, 5, 16, requires_grad=True)
    weights = sum(weight.numel() * 4 for weight in layer.blocks(torch.float32, "tiled").weights)
    assert saved_bytes(layer, x) - saved_bytes(other, x) >= weights
    for a, b in zip(
        torch.autograd.grad(layer(x).sum(), layer.parameters()),
        torch.autograd.grad(other(x).sum(), other.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_in_float64_it_changes_nothing():
    layer = IntBMoE(16, 64, experts=4, blocks=8).double()
    layer.recompute = True
    layer(torch.randn(1, 5, 16, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
