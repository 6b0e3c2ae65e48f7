"""What experts need to choose tokens: seats, exact capacities, packed choices, state in the wide type."""

import pytest
import torch
from torch import nn

from intbmoe.layer import LayerConfig
from intbmoe.parts.dispatch import capacity_of, exact_ratio, limit_capacity, seat, sum_seats, to_seats
from intbmoe.parts.router import pack_choices
from intbmoe.parts.state import WideBuffers


def test_seats_and_their_sums_are_transposes():
    token = torch.tensor([3, 0, 3, 1, 3, 0])
    plan = seat(token, 5)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(to_seats(x, plan), x[token])
    expected = torch.zeros(5, 2, dtype=torch.float64).index_add(0, token, v)
    torch.testing.assert_close(sum_seats(v, plan), expected)
    assert torch.autograd.gradcheck(lambda x: to_seats(x, plan), (x,))
    assert torch.autograd.gradcheck(lambda v: sum_seats(v, plan), (v,))
    assert torch.autograd.gradgradcheck(lambda v: sum_seats(v, plan).square(), (v,))


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_seats_are_ordinary_input(tokens):
    plan = seat(torch.zeros(0, dtype=torch.int64), tokens)
    assert to_seats(torch.ones(tokens, 2), plan).shape == (0, 2)
    assert torch.equal(sum_seats(torch.ones(0, 2), plan), torch.zeros(tokens, 2))


def test_capacity_rounds_up_exactly():
    assert capacity_of(exact_ratio(2), 196, 17) == 24
    assert capacity_of(exact_ratio(1.1), 10, 11) == 1
    assert capacity_of(exact_ratio(1.05), 392, 17, multiple=4) == 28
    assert capacity_of(exact_ratio(1e-5), 196, 17) == 1
    assert capacity_of(exact_ratio(2.0), torch.tensor([196, 0, 17, 18]), 17, multiple=4).tolist() == [24, 0, 4, 4]


def test_capacity_may_differ_between_sequences():
    ids = torch.zeros(2, 4, 1, dtype=torch.int64)
    kept = limit_capacity(ids, 2, torch.tensor([[1], [3]]))
    assert kept[..., 0].tolist() == [[0, -1, -1, -1], [0, 0, 0, -1]]


def test_packed_choices_put_the_active_first_heaviest_first():
    weights = torch.tensor([[0.0, 3.0, 2.0, 3.0], [1.0, 0.0, 5.0, 1.0]], requires_grad=True)
    active = torch.tensor([[True, True, False, True], [False, False, False, False]])
    ids, packed = pack_choices(weights, active)
    assert ids.tolist() == [[1, 3, 0, -1], [-1, -1, -1, -1]]
    assert packed.tolist() == [[3, 3, 0, 0], [0, 0, 0, 0]]
    packed.sum().backward()
    assert torch.equal(weights.grad, active.float())


class Counter(WideBuffers):
    def __init__(self):
        super().__init__(LayerConfig(2, 2))
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("value", torch.tensor([0.501]))
        self.register_buffer("count", torch.tensor([3]))
        self.register_buffer("nothing", None)


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_state_stays_wide(cast):
    layer = getattr(Counter(), cast)()
    assert layer.weight.dtype != torch.float32
    assert layer.value.dtype == torch.float32
    assert layer.value == torch.tensor(0.501)
    assert layer.count.dtype == torch.int64
    assert layer.nothing is None


def test_state_follows_to_a_wider_type_and_to_another_device():
    assert Counter().double().value.dtype == torch.float64
    moved = Counter().to("meta", torch.bfloat16)
    assert moved.value.device.type == "meta"
    assert moved.value.dtype == torch.float32
    assert moved.weight.dtype == torch.bfloat16
