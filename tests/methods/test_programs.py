"""A layer's forward as a program is the same as without, bit for bit; and who wants to be in between still is."""

import pytest
import torch
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import intbmoe
from intbmoe.ops.backend import TRITON
from interpreter import INTERPRETING, on_device, rerun

if not TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from intbmoe.ops.program import Program
from intbmoe.parts import programs

DIM, HIDDEN = 6, 11
OPTIONS = {
    "plain": {},
    "three layers, no gate": {"hidden": (10, 7), "gate": False},
    "only blocks": {"filter": False, "shared": False, "bias": False},
    "other shared and coefficients": {"shared_kind": "mlp", "coefficients": "softmax", "learn_scale": False},
}
if INTERPRETING:  # slow: those that differ most; a GPU runs all
    OPTIONS = {name: OPTIONS[name] for name in ("plain", "other shared and coefficients")}

if not INTERPRETING:

    @pytest.mark.slow  # programs are off by default
    def test_in_the_interpreter():
        rerun(__file__)


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setattr(programs, "ENABLED", True)


@pytest.fixture
def runs(monkeypatch):
    """How often a program has run."""
    programs._programs.clear()
    counted = []
    run = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, inputs: counted.append(1) or run(self, inputs))
    return counted


def make(device, **options):
    torch.manual_seed(0)
    layer = intbmoe.IntBMoE(DIM, **{"hidden": HIDDEN, "experts": 3, "blocks": 3, **options})
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer.to(device)


def draw(device, tokens=3):
    return torch.randn(2, tokens, DIM, device=device)


def forward(layer, x, mask=None, autocast=None):
    with torch.autocast(x.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        return layer(x, mask)


def all_of(layer, x, mask=None, autocast=None):
    """Output, counts, and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    y = forward(layer, x, mask, autocast)
    record = layer.statistics.take_record()
    gradients = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()], allow_unused=True)
    return [y.detach(), *(record.sums.values() if record else ()), *gradients]


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@on_device
@pytest.mark.parametrize("options", OPTIONS)
def test_the_same_bit_for_bit(device, runs, monkeypatch, options):
    """Plain layers under autocast, with masks, composing again in backward; others in float32."""
    layer, first, second = make(device, **OPTIONS[options]), draw(device), draw(device)
    plain = options == "plain"
    layer.recompute = plain
    masks = [torch.rand(2, 3, device=device) > 0.3 if plain else None for _ in range(2)]
    how = torch.bfloat16 if plain else None
    all_of(layer, first, masks[0], how)
    assert runs == []
    found = all_of(layer, second, masks[1], how)
    assert runs == [1]  # the second time a shape comes
    layer.eval()
    with torch.no_grad():
        without = [forward(layer, second, masks[1], how) for _ in range(2)]
    assert len(runs) == 2
    assert torch.equal(*without)
    layer.train()
    monkeypatch.setattr(programs, "run", lambda *_: None)
    same(found, all_of(layer, second, masks[1], how))


@on_device
def test_precomposed_and_shared_by_equal_layers(device, runs):
    layer, other = make(device).eval().precompose(), make(device).eval()
    with torch.no_grad():
        other.pools[0].weight.mul_(2)
        other = other.precompose()
        x = draw(device)
        expected = layer(x), other(x + 1)  # the second has been recorded: the two layers are of one kind
        assert len(runs) == 1
        same([layer(x), other(x + 1)], expected)
        assert len(runs) == 3
        other.backend = "naive"
        torch.testing.assert_close(other(x + 1), expected[1])


@on_device
def test_two_forwards_before_a_backward(device, runs):
    layer = make(device).eval()
    first, second = draw(device).requires_grad_(), draw(device).requires_grad_()
    expected = [all_of(layer, x)[1] for x in (first, second)]
    y = layer(first), layer(second)
    y[0].add_(1)  # an output belongs to whoever asked for it
    gradients = torch.autograd.grad((y[0] - 1).square().sum() + y[1].square().sum(), (first, second), retain_graph=True)
    torch.testing.assert_close(gradients, expected)
    y[1].sum().backward()
    y = layer(first)
    with torch.no_grad():
        layer.router.hidden.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@on_device
def test_there_is_no_second_derivative(device, runs):
    layer, x = make(device).eval(), draw(device).requires_grad_()
    for _ in range(3):
        y = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert len(runs) == 2
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


class Double(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@on_device
@pytest.mark.parametrize("change", ["hook", "parametrization", "shared", "forward", "parameter type"])
def test_a_changed_layer_is_asked(device, runs, change):
    layer, x = make(device).eval(), draw(device)
    with torch.no_grad():
        before = [layer(x) for _ in range(2)][1]
        assert len(runs) == 1
        match change:
            case "hook":
                layer.shared.register_forward_hook(lambda module, inputs, output: 2 * output)
            case "parametrization":
                parametrize.register_parametrization(layer.pools[0], "weight", Double())
            case "shared":
                layer.shared = None
            case "forward":
                layer.shared.forward = lambda x, backend: 0 * x
            case "parameter type":
                layer.double()
                x = x.double()
        after = layer(x)
        assert not torch.allclose(after, before.to(after.dtype), rtol=1e-9)
        assert len(runs) == 1
        layer.backend = "tiled"
        torch.testing.assert_close(layer(x), after, rtol=1e-4, atol=1e-4)


@on_device
def test_functional_call_and_checkpointing(device, runs):
    layer, x = make(device).eval(), draw(device).requires_grad_()
    expected = all_of(layer, x)[1]
    twice = {name: 2 * parameter for name, parameter in layer.named_parameters()}
    changed = [torch.func.functional_call(layer, twice, (x,)) for _ in range(3)]
    assert runs == [1, 1]
    same(changed[1:], changed[:1] * 2)
    assert not torch.allclose(changed[0], layer(x))
    (gradient,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(gradient, expected)


@on_device
def test_who_looks_sees_operations(device, runs):
    layer, x = make(device).eval(), draw(device)
    with torch.no_grad():
        expected, *_ = (layer(x) for _ in range(3))
        count = len(runs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert torch.equal(layer(x), expected)
        with intbmoe.record_routing(layer) as log:
            layer(x)
    assert len(runs) == count
    assert "intbmoe::gated_combine" in {event.key for event in profile.key_averages()}
    assert len(log) == 1
