"""A forward replayed from a CUDA graph gives what the layer gives; hooks and other observers still see every call.

Without a GPU, a graph is the recorded function itself, so that the code around it can be tested.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parametrize

import intbmoe
import replayed
from intbmoe.graphs import replay
from replayed import counting, draw, on_devices, plainly
from small_methods import METHODS, random_mask, tokens
from small_methods import make as make_method

UNREPLAYED = ("dense", "swiglu")  # few kernels


@pytest.fixture
def runs(monkeypatch):
    yield from counting(monkeypatch, replay._Graph, "run")


def make(device, **options):
    return replayed.make(device, **options).eval()


@on_devices
@pytest.mark.parametrize("form", ["trainable", "precomposed"])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_same_as_without(device, runs, form, autocast):
    layer = make(device) if form == "trainable" else make(device).precompose()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
        for count in range(4):
            x, mask = draw(device), torch.rand(2, 3, device=device) > 0.3
            assert torch.equal(layer(x), plainly(layer, x))
            assert torch.equal(layer(x.mT.contiguous().mT, mask), plainly(layer, x, mask))
            assert len(runs) == 2 * count  # from the second call with a shape on
        before = layer(x)
        layer.router.scores.weight.mul_(-3)  # as a training step would
        assert torch.equal(layer(x), plainly(layer, x))
        assert not torch.equal(layer(x), before)


@on_devices
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, device, runs):
    layer = make_method(name, torch.float32).to(device).eval()
    with torch.no_grad():
        for number in range(3):
            x, mask = tokens(2, 5, dtype=torch.float32, seed=number), random_mask(2, 5, seed=number)
            x, mask = x.to(device), mask.to(device)
            assert torch.equal(layer(x, mask), plainly(layer, x, mask))
    assert len(runs) == (0 if name in UNREPLAYED else 2)


@on_devices
def test_outputs_belong_to_the_caller(device, runs):
    layer, first, second = make(device), draw(device), draw(device)
    with torch.inference_mode():
        layer(first)
        y = layer(first)
        kept = y.clone()
        layer(second)
        assert torch.equal(y, kept)
    with torch.no_grad():  # a graph recorded in inference mode is used here too
        assert torch.equal(layer(first), kept)
    assert len(runs) == 3


class Double(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@on_devices
@pytest.mark.parametrize("change", ["hook", "parametrization", "shared", "forward", "subclass"])
def test_a_changed_layer_is_asked(device, runs, change):
    layer, x = make(device), draw(device)
    with torch.no_grad():
        before = [layer(x) for _ in range(2)][1]
        assert len(runs) == 1
        match change:
            case "hook":
                layer.shared.register_forward_hook(lambda module, inputs, output: 2 * output)
            case "parametrization":
                parametrize.register_parametrization(layer.pools[0], "weight", Double())
            case "shared":
                layer.shared = Double().to(device)
            case "forward":
                layer.shared.forward = lambda x, backend: 0 * x
            case "subclass":
                layer.__class__ = type("Negated", (intbmoe.IntBMoE,), {"compute": negated})
        after = [layer(x) for _ in range(3)]
        assert not torch.allclose(after[-1], before)
        assert torch.equal(after[-1], plainly(layer, x))
        assert len(runs) == 1


def negated(self, x, *rest):
    return intbmoe.IntBMoE.compute(self, -x, *rest)


@on_devices
def test_another_config_is_another_graph(device, runs):
    layer, x = make(device), draw(device)
    with torch.no_grad():
        before = [layer(x) for _ in range(2)][1]
        layer.config = replace(layer.config, top_k=1)
        assert not torch.allclose(layer(x), before)
        assert len(runs) == 1
        assert torch.equal(layer(x), plainly(layer, x))
        assert len(runs) == 2


@on_devices
def test_moved_parameters_are_another_graph(device, runs):
    layer, x = make(device), draw(device)
    with torch.no_grad():
        layer(x), layer(x)
        kept = layer.codebook.data  # so that the new one does not get its memory
        layer.codebook.data = -kept
        assert torch.equal(layer(x), plainly(layer, x))
        assert len(runs) == 1
        assert torch.equal(layer(x), plainly(layer, x))
        assert len(runs) == 2
        twice = {name: 2 * parameter for name, parameter in layer.named_parameters()}
        changed = [torch.func.functional_call(layer, twice, (x,)) for _ in range(3)]
        assert torch.equal(changed[0], changed[2])
        assert not torch.allclose(changed[2], layer(x))


@on_devices
def test_training_gradients_and_bad_inputs_go_the_ordinary_way(device, runs):
    layer, x = make(device), draw(device)
    for _ in range(3):
        layer(x.requires_grad_()).sum().backward()
    layer.train()
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        assert runs == []
        layer.eval()
        for _ in range(2):
            with pytest.raises(TypeError, match="mask is"):
                layer(x, torch.ones(2, 3, device=device))
            with pytest.raises(ValueError, match="expected"):
                layer(x, torch.ones(3, 2, device=device, dtype=torch.bool))


@on_devices
def test_routing_is_recorded_from_a_graph(device, runs):
    layer, x = make(device), draw(device)
    with torch.no_grad():
        layer(x)
        with intbmoe.record_routing(layer) as log:
            layer(x)
        layer(x)
        assert len(runs) == 1
        with intbmoe.record_routing(layer) as again:
            layer(x)
    assert len(runs) == 2
    (first,), (second,) = log.values(), again.values()
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.weights, second.weights)
