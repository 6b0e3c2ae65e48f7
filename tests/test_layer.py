"""The base contract, on a method made for the test."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import intbmoe
from echo import Echo, EchoConfig
from intbmoe.layer import moe_layers


def test_leading_dimensions_are_folded_and_restored():
    layer = Echo(4, 4, factor=2.0)
    x = torch.randn(2, 3, 5, 4)
    assert torch.equal(layer(x, torch.ones(2, 3, 5, dtype=torch.bool)), 2 * x)
    assert layer.seen[0] == (6, 5, 4)
    assert layer.seen[1].shape == (6, 5)
    layer(x[0, 0])
    assert layer.seen[0] == (1, 5, 4)


def test_autocast_is_off_inside_and_its_type_is_handed_on():
    layer = Echo(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(2, 3, 4))
    assert layer.seen[2:] == (torch.bfloat16, False)
    layer(torch.randn(2, 3, 4))
    assert layer.seen[2:] == (torch.float32, False)


def test_padding_of_nan_is_zero_inside_and_outside():
    layer = Echo(4, 4)
    x = torch.full((1, 2, 4), float("nan"))
    x[0, 0] = 1
    y = layer(x, torch.tensor([[True, False]]))
    assert torch.equal(y, torch.tensor([[[1.0] * 4, [0.0] * 4]]))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_leave_the_record_of_a_forward_behind(clone):
    layer = Echo(4, 4)
    layer(torch.randn(1, 2, 4))
    assert layer.statistics.record is not None
    assert clone(layer).statistics.record is None


def test_help_shows_the_configs_fields():
    parameters = inspect.signature(intbmoe.IntBMoE).parameters
    assert list(parameters)[:4] == ["dim", "hidden", "experts", "blocks"]
    assert parameters["top_k"].default == 2


def test_a_config_and_options_together_are_refused():
    with pytest.raises(ValueError, match="left out when a Config is given"):
        Echo(EchoConfig(4, 4), factor=2.0)
    with pytest.raises(ValueError, match=r"hidden=16 is not allowed.*left out when a Config is given"):
        Echo(EchoConfig(4, 4), 16)


def test_names_show_no_wrapper():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Echo(4, 4)))
    assert [name for name, _ in moe_layers(torch.compile(model))] == ["1.0"]
    model[1] = torch.compile(model[1])
    assert [name for name, _ in moe_layers(model)] == ["1.0"]


def test_token_wise_methods_have_no_decoding_state():
    assert Echo(4, 4).new_state(3) is None
