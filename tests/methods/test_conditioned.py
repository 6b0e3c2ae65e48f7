"""Layers conditioned on a task or a scenario, alone and as the head of the travel model."""

import pytest
import torch
import torch.nn.functional as F

import intbmoe
from small_methods import DIM, HIDDEN, TINY, tokens

X = tokens(1, 5)
TASKS = {
    "mmoe": {"experts": 3},
    "ple": {"experts": 6, "task_experts": 1, "levels": 2},
    "dsfnet": {"experts": 3},
    "intbmoe": TINY["intbmoe"],
}


def make(name, tasks=3):
    torch.manual_seed(1)
    return intbmoe.create(name, DIM, HIDDEN, **TASKS[name], conditioning_dim=tasks).double()


def task(k):
    return F.one_hot(torch.tensor(k), 3).double()


@pytest.mark.parametrize("name", TASKS)
def test_gradients_by_task_agree_with_finite_differences(name):
    layer, vector = make(name).eval(), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64, requires_grad=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, vector, *values):
        inputs = {"conditioning": vector}
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,), inputs)

    assert torch.autograd.gradcheck(run, (X.clone().requires_grad_(), vector, *values), fast_mode=True)
    outputs = [layer(X, conditioning=task(k)) for k in range(3)]
    assert all((outputs[i] - outputs[j]).abs().max() > 1e-6 for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_is_missing_or_misshapen_is_told(name):
    layer = make(name)
    with pytest.raises(ValueError, match=r"conditioning=None.*conditioning_dim=3 numbers, one for the whole call"):
        layer(X)
    with pytest.raises(ValueError, match=r"shape \(2,\).*conditioning_dim=3"):
        layer(X, conditioning=torch.ones(2))
    plain = intbmoe.create(name, DIM, HIDDEN, **TASKS[name]).double()
    with pytest.raises(ValueError, match="None if conditioning_dim is 0"):
        plain(X, conditioning=torch.ones(3))


def test_mmoe_has_a_gate_for_each_task_over_one_pool():
    layer = make("mmoe")
    outputs = layer.experts.batch(X.expand(3, -1, -1))
    for k in range(3):
        gate = (X[0] @ layer.router.weight[3 * k : 3 * k + 3].t()).softmax(-1)
        expected = torch.einsum("te,etd->td", gate, outputs)
        torch.testing.assert_close(layer(X, conditioning=task(k))[0], expected, rtol=0, atol=1e-12)


def test_ple_mixes_own_and_shared_experts_on_two_levels():
    """Three tasks with one expert each, and three shared ones; token by token."""
    layer = make("ple")

    def run(level, e, x):
        up, down = layer.experts[level].up, layer.experts[level].down
        return F.gelu(x @ up.weight[e] + up.bias[e]) @ down.weight[e] + down.bias[e]

    for t, k in ((0, 0), (3, 1), (4, 2)):
        streams, shared = [X[0, t]] * 3, X[0, t]
        for level in range(2):
            own = [run(level, i, streams[i]) for i in range(3)]
            common = [run(level, 3 + i, shared) for i in range(3)]
            mixed = []
            for i in range(3):
                gate = (streams[i] @ layer.router[level].weight[i]).softmax(-1)
                mixed.append(sum(g * out for g, out in zip(gate, [own[i], *common], strict=True)))
            if level == 0:
                gate = layer.shared_router[0](shared).softmax(-1)
                shared = sum(g * out for g, out in zip(gate, own + common, strict=True))
            streams = mixed
        torch.testing.assert_close(layer(X, conditioning=task(k))[0, t], streams[k], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"experts=3.*more than tasks . task_experts"):
        intbmoe.create("ple", DIM, HIDDEN, experts=3, conditioning_dim=3)


def test_dsfnet_merges_by_the_scenario_of_the_call_or_of_each_sequence():
    layer, x = make("dsfnet"), tokens(2, 5)
    scenarios = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = layer(x, conditioning=scenarios)
    for b in range(2):
        a = layer.router(scenarios[b]).softmax(-1)
        up, down = (torch.einsum("e,eio->io", a, part.weight) for part in (layer.experts.up, layer.experts.down))
        biases = [a @ part.bias for part in (layer.experts.up, layer.experts.down)]
        expected = F.gelu(x[b] @ up + biases[0]) @ down + biases[1]
        torch.testing.assert_close(y[b], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer(x, conditioning=scenarios[b])[b], expected, rtol=0, atol=1e-12)
