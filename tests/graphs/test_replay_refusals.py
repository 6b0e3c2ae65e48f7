"""Training code for which a layer is launched instead of replayed, or gets an error instead of wrong gradients."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import intbmoe
from intbmoe.graphs import replay, training
from replayed import DIM, FIRST, draw, equal, gradients, make, on_devices, plainly, recorded


@on_devices
def test_backward_twice(device, runs):
    layer, x = recorded(make(device), draw(device)), draw(device, requires_grad=True)
    loss = (layer(x) ** 2).sum()
    first = torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=True)
    gradients(layer, draw(device))  # takes the ordinary way, because the graph may be needed again
    assert len(runs) == 2
    equal(torch.autograd.grad(loss, [x, *layer.parameters()]), first)
    loss = layer(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert len(runs) == 3


def move(parameter):
    parameter.data = parameter.data.clone()


@torch.no_grad()
def scale(parameter):
    parameter.mul_(2)


@on_devices
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", [move, scale])
def test_a_parameter_changed_before_backward_is_an_error(device, runs, change, frozen):
    layer = make(device).requires_grad_(not frozen)
    for _ in range(FIRST + 1):
        loss = layer(draw(device, requires_grad=True)).sum()
        if len(runs) < 2:
            loss.backward()
    assert len(runs) == 2
    change(layer.codebook)
    with pytest.raises(RuntimeError, match="changed or moved between forward and backward"):
        loss.backward()


@on_devices
@pytest.mark.parametrize("power", [1, 2])  # a linear loss has gradients that need none themselves
def test_second_derivatives_are_refused(device, runs, power):
    layer, x = recorded(make(device), draw(device)), draw(device, requires_grad=True)
    loss = layer(x).pow(power).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    equal([grad.detach()], torch.autograd.grad(plainly(layer, x).pow(power).sum(), [x]))
    assert len(runs) == 2
    with pytest.raises(RuntimeError, match="no second derivatives: set INTBMOE_GRAPHS=0"):
        (loss + grad.norm()).backward()


@on_devices
def test_batched_gradients_are_refused(device, runs):
    layer, x = recorded(make(device), draw(device)), draw(device, requires_grad=True)
    y = layer(x)
    with pytest.raises(RuntimeError, match="no batched gradients: set INTBMOE_GRAPHS=0"):
        torch.autograd.grad(y, x, torch.randn(4, *y.shape, device=device), is_grads_batched=True)
    assert len(runs) == 2


@on_devices
def test_a_pruned_parameter_and_deterministic_algorithms(device, runs):
    """The tensor and its address stay; so do the settings of the layer."""
    layer = recorded(make(device), draw(device))
    modules = replay._found[layer]
    before = modules.place()
    layer.codebook.data = layer.codebook.data[:2]
    assert modules.place() != before
    layer = recorded(make(device), draw(device))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        gradients(layer, draw(device))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(runs) == 2


@on_devices
def test_lory_with_another_segment(device, runs):
    layer = intbmoe.create("lory", DIM, hidden=24, experts=3, tokens=8).to(device)
    assert layer.segment == 4
    x = draw(device, tokens=8)
    recorded(layer, x)
    state = layer.state_dict()
    state["cut_segment"] = torch.tensor(2)
    layer.load_state_dict(state)
    equal(gradients(layer, x), plainly(gradients, layer, x))
    assert len(runs) == 1


@on_devices
def test_a_layer_in_a_layer_is_launched(device):
    layer = make(device)
    assert replay._Modules(layer).known
    layer.shared = make(device)
    assert not replay._Modules(layer).known


@on_devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_takes_the_ordinary_way(device, runs, reentrant):
    layer, x = recorded(make(device), draw(device)), draw(device)

    def checkpointed():
        layer.zero_grad()
        own = x.detach().requires_grad_()
        checkpoint(layer, own, use_reentrant=reentrant).pow(2).sum().backward()
        return [own.grad, *(each.grad for each in layer.parameters())]

    expected = plainly(checkpointed)
    for _ in range(FIRST):
        equal(checkpointed(), expected)
    assert len(runs) == 1


@on_devices
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_observers_see_the_layers_own_operations(device, runs):
    layer, x = recorded(make(device), draw(device)), draw(device, requires_grad=True)
    with intbmoe.record_routing(layer) as log:
        layer(x)
    assert [record.ids.shape for record in log.values()] == [(6, 2)]
    with torch.autograd.detect_anomaly(check_nan=False):
        gradients(layer, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        gradients(layer, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        gradients(layer, x)
    assert len(runs) == 1


@pytest.mark.gpu
def test_a_full_device_records_nothing(runs, monkeypatch):
    monkeypatch.setattr(training, "FREE_SHARE", 1.1)
    recorded(recorded(make("cuda"), draw("cuda")), draw("cuda"))
    assert runs == []
