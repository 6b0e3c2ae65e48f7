"""A training forward and backward replayed from CUDA graphs leave what the layer's own leave, whatever the loop does.

Without a GPU, a graph is the recorded function itself, so that the code around it can be tested.
"""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import intbmoe
from intbmoe.graphs import replay, training
from replayed import FIRST, draw, equal, gradients, make, on_devices, plainly, recorded
from small_methods import METHODS, random_mask, tokens
from small_methods import make as make_method

UNREPLAYED = ("dense", "swiglu")  # few kernels


@on_devices
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_same_as_without(device, runs, autocast, masked):
    layer = make(device)
    for count in range(1, FIRST + 3):
        x, mask = draw(device), torch.rand(2, 3, device=device) > 0.3 if masked else None
        equal(gradients(layer, x, mask, autocast), plainly(gradients, layer, x, mask, autocast))
        assert len(runs) == max(0, count - FIRST + 1)


@on_devices
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, device, runs):
    layer = make_method(name, torch.float32).to(device)
    plain, forwards = copy.deepcopy(layer), FIRST + 2

    def step(layer, number):
        torch.manual_seed(number)  # some methods draw random numbers
        layer.zero_grad()
        x, mask = tokens(2, 5, dtype=torch.float32, seed=number), random_mask(2, 5, seed=number)
        x = x.to(device).requires_grad_()
        y = layer(x, mask.to(device))
        loss = intbmoe.aux_loss(layer)
        (y.square().sum() + loss).backward()
        intbmoe.before_step(layer, None, lambda: loss)
        intbmoe.after_step(layer)
        return [y.detach(), loss.detach(), x.grad, torch.rand(3, device=device), *gradients_of(layer)]

    for number in range(forwards):
        equal(step(layer, number), plainly(step, plain, number))
    assert len(runs) == (0 if name in UNREPLAYED else forwards - FIRST + 1)
    equal(layer.state_dict().values(), plain.state_dict().values())
    assert intbmoe.load_statistics(layer) == intbmoe.load_statistics(plain)


def gradients_of(layer):
    return [each.grad for each in layer.parameters()]


@on_devices
def test_training_ends_with_the_same_weights(device, runs):
    def train(layer):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(layer.parameters(), 0.01)
        for _ in range(8):
            optimizer.zero_grad()
            for _ in range(2):  # micro-batches
                (layer(draw(device)) ** 2).sum().add(intbmoe.aux_loss(layer)).backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            intbmoe.after_step(layer, optimizer)
        return [*layer.parameters(), layer.statistics.window["load"]]

    ours, plain = make(device), make(device)
    equal(train(ours), plainly(train, plain))
    assert len(runs) == 16 - FIRST + 1


class Loop:
    """Does with one layer what a training loop may do, in any order."""

    def __init__(self, layer):
        self.layer, self.optimizer, self.pending = layer, torch.optim.SGD(layer.parameters(), 0.01), []

    def forward(self, number, device):
        torch.manual_seed(number)
        x = draw(device, tokens=2 + number % 2, requires_grad=True)
        self.pending.append((x, self.layer(x)))
        return [self.pending[-1][1].detach()]

    def backward(self, number, device):
        x, y = self.pending[number % len(self.pending)] if self.pending else (None, None)
        if y is None:
            return []
        y.square().sum().backward(retain_graph=number % 3 == 0)
        if number % 3:
            self.pending = [pair for pair in self.pending if pair[0] is not x]
        return [x.grad, *(each.grad for each in self.layer.parameters())]

    def drop(self, number, device):
        del self.pending[: number % 3]
        return []

    def step(self, number, device):
        self.pending.clear()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        return list(self.layer.parameters())

    def evaluate(self, number, device):
        torch.manual_seed(number)
        self.layer.eval()
        with torch.no_grad():
            y = self.layer(draw(device))
        self.layer.train()
        return [y]


def nothing_lost(found, expected):
    assert [each is None for each in found] == [each is None for each in expected]
    equal(*([each for each in some if each is not None] for some in (found, expected)))


@on_devices
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    loop=st.lists(
        st.tuples(
            st.sampled_from(["forward", "forward", "backward", "backward", "drop", "step", "evaluate"]),
            st.integers(0, 9),
        ),
        min_size=10,
        max_size=40,
    )
)
def test_any_loop(device, runs, loop):
    replay._found.clear()
    layer = make(device)
    ours, plain = Loop(recorded(recorded(layer, draw(device)), draw(device, tokens=2))), Loop(copy.deepcopy(layer))
    for each in (ours, plain):
        each.layer.zero_grad()
    for action, number in loop:
        found = getattr(ours, action)(number, device)
        nothing_lost(found, plainly(getattr(plain, action), number, device))


@on_devices
def test_the_default_stream_and_large_inputs(device, runs, monkeypatch):
    layer, x = make(device), draw(device)
    monkeypatch.setattr(training, "MOST_PRODUCTS", x.numel() * 24)
    recorded(layer, x)
    assert len(runs) == 1
    recorded(layer, draw(device, tokens=4))
    monkeypatch.setattr(replay, "_on_default_stream", lambda x: False)
    recorded(layer, x)
    assert len(runs) == 1


@on_devices
def test_results_belong_to_the_caller(device, runs):
    layer = recorded(make(device), draw(device))
    kept = gradients(layer, draw(device))
    copies = [each.clone() for each in kept]
    gradients(layer, draw(device))
    assert len(runs) == 3
    equal(kept, copies)


@on_devices
def test_several_forwards_before_a_backward(device, runs):
    layer = recorded(make(device), draw(device))
    first, second = draw(device, requires_grad=True), draw(device, requires_grad=True)

    def both():
        layer.zero_grad()
        one, two = layer(first), layer(second)
        found = torch.autograd.grad((two**2).sum() + (one**3).sum(), [first, second, *layer.parameters()])
        return [one.detach(), two.detach(), *found]

    expected = plainly(both)
    runs.clear()
    torch.testing.assert_close(both(), expected)  # λ's gradients are added in another order
    assert len(runs) == 1  # the first forward's numbers are still needed during the second
    layer(first)  # without a backward: as soon as its output is gone, the graph is free
    gradients(layer, first)
    assert len(runs) == 3


@on_devices
def test_frozen_parameters_and_inputs_without_gradients(device, runs):
    layer, x = make(device), draw(device)

    def parameters_only():
        layer.zero_grad()
        (layer(x) ** 2).sum().backward()
        return [each.grad for each in layer.parameters() if each.requires_grad]

    for frozen in ((), ("codebook",), ("pools.0.weight", "router.scores.bias")):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in frozen)
        before = len(runs)
        for _ in range(FIRST + 1):
            equal(parameters_only(), plainly(parameters_only))
        assert len(runs) == before + 2
        assert all(layer.get_parameter(name).grad is None for name in frozen)
    layer.requires_grad_(False)
    before = len(runs)
    for _ in range(FIRST + 1):
        assert not layer(x).requires_grad
    assert len(runs) == before
    equal(gradients_of_input(layer, x), plainly(gradients_of_input, layer, x))
    assert len(runs) == before + 1


def gradients_of_input(layer, x):
    x = x.detach().requires_grad_()
    for _ in range(FIRST):
        (found,) = torch.autograd.grad((layer(x) ** 2).sum(), x)
    return [found]


@on_devices
def test_a_buffer_that_needs_a_gradient(device, runs):
    layer = make(device, learn_scale=False)
    layer.scale.requires_grad_()

    def step():
        return [*torch.autograd.grad(layer(draw(device)).square().sum(), [layer.scale, layer.codebook])]

    for number in range(FIRST + 1):
        torch.manual_seed(number)
        expected = plainly(step)
        torch.manual_seed(number)
        equal(step(), expected)
    assert len(runs) == 2


@on_devices
def test_hooks_of_parameters_run_once_per_backward(device, runs):
    layer, seen = make(device), []
    layer.codebook.register_hook(lambda grad: seen.append("gradient") or 2 * grad)
    layer.codebook.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    for _ in range(FIRST + 1):
        x = draw(device)
        found = gradients(layer, x)
        assert seen == ["gradient", "accumulated"]
        equal(found, plainly(gradients, layer, x))
        seen.clear()
    assert len(runs) == 2


@on_devices
def test_few_shapes_are_recorded(device, runs):
    layer = make(device)
    for count in (2, 3, 4) * FIRST:  # never the same twice in a row
        gradients(layer, draw(device, count))
    assert runs == []
    for count in (2, 3, 4):
        recorded(layer, draw(device, count))
    assert len(runs) == 3
    gradients(layer, draw(device, 3)), gradients(layer, draw(device, 4))
    assert len(runs) == 5
    gradients(layer, draw(device, 2))  # made room for the third
    assert len(runs) == 5


@on_devices
def test_moved_parameters_and_another_config(device, runs):
    layer, x = recorded(make(device), draw(device)), draw(device)
    kept = layer.codebook.data  # so that the new one does not get its memory
    layer.codebook.data = -kept
    equal(gradients(layer, x), plainly(gradients, layer, x))
    assert len(runs) == 1
    recorded(layer, x)
    assert len(runs) == 3
    layer.recompute = True
    equal(gradients(layer, x), plainly(gradients, layer, x))
    assert len(runs) == 3
    twin = copy.deepcopy(layer)
    equal(gradients(twin, x), plainly(gradients, layer, x))
    assert len(runs) == 3


@on_devices
def test_evaluation_between_training_steps(device, runs):
    layer, x = recorded(make(device), draw(device)), draw(device, requires_grad=True)
    y = layer(x)
    layer.eval()
    with torch.no_grad():
        expected = plainly(layer, x)
        for _ in range(3):
            assert torch.equal(layer(x), expected)
    found = torch.autograd.grad((y**2).sum(), x)
    equal(found, torch.autograd.grad((plainly(layer, x) ** 2).sum(), x))
    assert len(runs) == 2


@pytest.mark.gpu
def test_graphs_go_with_their_layer(runs):
    """On the CPU a graph is the layer's own function, which keeps it."""
    layer = recorded(make("cuda"), draw("cuda"))
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


@pytest.mark.gpu
def test_a_moved_layer_leaves_nothing_behind(runs):
    def allocated():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    recorded(make("cuda"), draw("cuda"))  # what is made once for all layers
    before = allocated()
    layer = recorded(make("cuda", experts=64, hidden=500), draw("cuda", tokens=400))
    layer.zero_grad()
    assert allocated() - before > 2**20
    layer.cpu()
    assert allocated() < before + 2**16  # a library may keep a small buffer


@pytest.mark.gpu
def test_layers_share_the_memory_of_their_backward_passes(runs):
    """Graphs of two layers, run in an order in which they were not recorded, with an evaluation in between."""
    first, second, large = make("cuda"), make("cuda", hidden=200, blocks=8), draw("cuda", tokens=500)
    for layer in (first, second):
        recorded(layer, large)
        layer.eval()
        with torch.no_grad():
            layer(large), layer(large)
        layer.train()

    def crossed():
        found = []
        for one, other in ((first, second), (second, first)):
            x = large.detach().requires_grad_()
            y = other(one(x))
            other.eval()
            with torch.no_grad():
                other(large)
            other.train()
            found += torch.autograd.grad((y**2).sum(), [x, *one.parameters(), *other.parameters()])
        return found

    expected = plainly(crossed)
    runs.clear()
    equal(crossed(), expected)
    assert len(runs) == 4
