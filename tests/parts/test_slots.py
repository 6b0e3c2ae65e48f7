"""Slots of a pool: what is reset when a slot gets a new expert, and what is refused."""

import pytest
import torch
from torch import nn

import intbmoe
from intbmoe.parts.slots import PoolConfig, reset_moments, unit


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_moments_of_the_named_slots_are_zero_and_the_others_stay(kind):
    stacked = nn.Parameter(torch.randn(4, 3))
    optimizer = kind([stacked])
    stacked.square().sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[stacked].items()}
    reset_moments(optimizer, [stacked], torch.tensor([False, True, False, True]))
    for name, value in optimizer.state[stacked].items():
        if value.shape == stacked.shape:
            assert (value[[1, 3]] == 0).all()
            assert torch.equal(value[[0, 2]], before[name][[0, 2]])
            assert (before[name][[1, 3]] != 0).all()
        else:
            assert torch.equal(value, before[name])  # the step count belongs to the whole parameter


def test_an_optimizer_that_has_not_stepped_or_is_not_given_is_no_error():
    stacked = nn.Parameter(torch.randn(4, 3))
    every = torch.ones(4, dtype=torch.bool)
    reset_moments(None, [stacked], every)
    reset_moments(torch.optim.AdamW([stacked]), [stacked], every)


def test_sharded_parameters_are_refused_by_name():
    layer = intbmoe.create("dynmoe", 2, 2)
    layer._require_whole_slots()
    layer.experts.up.weight.full_tensor = None  # what marks a DTensor
    with pytest.raises(RuntimeError, match=r"DynMoE.*'experts.up.weight'.*DistributedDataParallel"):
        layer._require_whole_slots()
    layer.experts.exchange = object()  # ranks hold whole experts
    layer._require_whole_slots()
    layer.embeddings.full_tensor = None
    with pytest.raises(RuntimeError, match="'embeddings'"):
        layer._require_whole_slots()


def test_unit_vectors_and_the_zero_vector():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    y = unit(x)
    torch.testing.assert_close(y, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_the_start_is_half_unless_told():
    assert [PoolConfig(8, 8, experts=n).start for n in (17, 9, 33, 1)] == [8, 4, 16, 1]
    assert PoolConfig(8, 8, experts=4, initial_experts=3).start == 3
    with pytest.raises(ValueError, match=r"initial_experts=5.*at most experts \(4\)"):
        PoolConfig(8, 8, experts=4, initial_experts=5)
