"""Operations give the same whether called directly or through torch, and observers see them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from intbmoe.ops.grouped_mm import grouped


class Seen(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def case():
    x = torch.randn(9, 8, requires_grad=True)
    weight = torch.randn(3, 8, 4, requires_grad=True)
    return x, weight, torch.tensor([2, 2, 7], dtype=torch.int32), False


def results(case):
    x, weight, *_ = case
    y = grouped.grouped_mm(*case)
    gradients = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
    second = torch.autograd.grad(gradients[0].square().sum(), (x, weight))
    return y, *gradients, *second


def test_a_mode_sees_the_operation_and_gets_the_same(case):
    direct = results(case)
    with Seen() as seen:
        observed = results(case)
    assert {"intbmoe::grouped_mm", "intbmoe::grouped_outer"} <= set(seen.names)
    for one, other in zip(direct, observed, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_profile_names_the_operation(case):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        grouped.grouped_mm(*case)
    assert "intbmoe::grouped_mm" in {event.key for event in profile.key_averages()}


def test_without_gradients_there_is_no_graph(case):
    with torch.no_grad():
        assert grouped.grouped_mm(*case).grad_fn is None
    x, weight, *rest = case
    assert grouped.grouped_mm(x.detach(), weight.detach(), *rest).grad_fn is None


def test_what_is_saved_can_be_moved_by_hooks(case):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(1) or tensor, lambda tensor: tensor):
        y = grouped.grouped_mm(*case)
    assert len(packed) == 3
    y.sum().backward()


def test_a_changed_input_is_noticed(case):
    x, weight, *rest = case
    y = grouped.grouped_mm(x * 1, held := weight * 1, *rest)
    with torch.no_grad():
        held.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
