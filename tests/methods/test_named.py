"""Methods that the paper names but does not measure, against their equations, token by token in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import intbmoe
from small_methods import make, tokens

X = tokens(1, 7)


def outputs_of(layer):
    """(T, E, d), every expert on every token of X."""
    return layer.experts.batch(X.expand(layer.config.experts, -1, -1)).transpose(0, 1)


def probabilities(layer):
    return layer.router(X[0]).softmax(-1)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mixture", "mmoe"])
def test_a_dense_mixture_is_the_mean_of_outputs_by_probability(name):
    layer = make(name)
    close(layer(X)[0], torch.einsum("te,ted->td", probabilities(layer), outputs_of(layer)))


def test_mixtral_renormalises_over_the_chosen_and_its_loss_is_hugging_face_s():
    layer = make("mixtral")
    p = probabilities(layer)
    best, ids = p.topk(2)
    chosen = outputs_of(layer).gather(1, ids.unsqueeze(-1).expand(-1, -1, 8))
    close(layer(X)[0], ((best / best.sum(-1, keepdim=True)).unsqueeze(-1) * chosen).sum(1))
    share = F.one_hot(ids, 4).double().mean(0)  # (k, E)
    close(intbmoe.aux_loss(layer), 0.001 * 4 * (share * p.mean(0)).sum())


def test_deepseek_v1_keeps_probabilities_and_evens_out_experts_and_devices():
    layer = make("deepseek_v1", balance=0.3, device_balance=0.7)
    p = probabilities(layer)
    best, ids = p.topk(3)
    chosen = outputs_of(layer).gather(1, ids.unsqueeze(-1).expand(-1, -1, 8))
    close(layer(X)[0], layer.shared(X[0]) + (best.unsqueeze(-1) * chosen).sum(1))
    f = F.one_hot(ids, 6).double().sum((0, 1)) * 6 / (3 * 7)
    devices = [(f[part].mean(), p.mean(0)[part].sum()) for part in (slice(0, 3), slice(3, 6))]
    expected = 0.3 * (f * p.mean(0)).sum() + 0.7 * sum(a * b for a, b in devices)
    close(intbmoe.aux_loss(layer), expected)
    budget = intbmoe.match_budget("deepseek_v1", 192, 768, experts=15)
    assert (budget["experts"], budget["top_k"], budget["hidden"]) == (63, 7, 128)  # the paper's 2B model


@pytest.mark.parametrize("k", [1, 2])
def test_hypermoe_makes_a_network_of_the_experts_not_chosen(k):
    layer = make("hypermoe", top_k=k)
    with torch.no_grad():
        for head in (*layer.weights.values(), *layer.biases.values()):
            head.weight.mul_(1000)  # it starts near zero
    best, ids = probabilities(layer).topk(k)
    if k == 2:
        best = best / best.sum(-1, keepdim=True)
    first, second, last = layer.hypernetwork
    y = []
    for t, chosen in enumerate(ids.tolist()):
        absent = sum(layer.embeddings[e] for e in range(4) if e not in chosen)
        u = last(second(first(absent).relu())).relu()
        z = (X[0, t] @ layer.weights["down"](u).view(8, 2) + layer.biases["down"](u)).relu()
        small = z @ layer.weights["up"](u).view(2, 8) + layer.biases["up"](u)
        y.append(sum(w * outputs_of(layer)[t, e] for w, e in zip(best[t], chosen, strict=True)) + small)
    close(layer(X)[0], torch.stack(y))
    assert len({tuple(sorted(row)) for row in ids.tolist()}) > 1
    sets = list(itertools.combinations(range(4), k))
    found = intbmoe.methods.hypermoe._set_of(torch.tensor(sets)).squeeze(1)
    member = intbmoe.methods.hypermoe._sets(4, k, torch.device("cpu"))[found]
    assert [tuple(row.nonzero().squeeze(1).tolist()) for row in member] == sets


@pytest.mark.parametrize("expert", ["gelu", "swiglu"])
@pytest.mark.parametrize("activation", ["silu", "tanh", "none"])
def test_mobe_s_first_matrices_are_its_own_times_shared_bases(expert, activation):
    layer = make("mobe", expert=expert, activation=activation).eval()
    best, ids = layer.router(X[0]).topk(2)
    act = {"silu": F.silu, "tanh": torch.tanh, "none": lambda z: z}[activation]

    def matrix(part, e):
        shares = part.mixing[e].softmax(-1)
        return act(sum(a * base for a, base in zip(shares, part.bases, strict=True))) @ part.own.weight[e]

    def run(x, e):
        parts = layer.experts
        if expert == "gelu":
            z = F.gelu(x @ matrix(parts.up, e) + parts.up.own.bias[e])
            return z @ parts.down.weight[e] + parts.down.bias[e]
        return (F.silu(x @ matrix(parts.gate, e)) * (x @ matrix(parts.up, e))) @ parts.down.weight[e]

    expected = [
        sum(w * run(x, e) for w, e in zip(row.softmax(-1), chosen, strict=True))
        for x, row, chosen in zip(X[0], best, ids.tolist(), strict=True)
    ]
    close(layer(X)[0], torch.stack(expected))


def test_mobe_starts_with_the_variance_of_a_linear_map():
    layer = intbmoe.create("mobe", 128, 64, experts=4, bases=8)
    weight = layer.experts.gate.composed() @ layer.experts.gate.own.weight
    assert 0.6 < weight.var() * 3 * 128 < 1.7
