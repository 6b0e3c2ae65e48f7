"""The sparsely-gated mixture: gates, and the two losses token by token."""

import pytest
import torch
from torch.distributions import Normal

import intbmoe
from intbmoe.methods import shazeer
from small_methods import make, tokens


def variation(x):
    return x.var(unbiased=False) / x.mean() ** 2


def test_gates_and_losses_are_the_loops(monkeypatch):
    layer, x = make("shazeer", importance=0.3, load=0.7), tokens(1, 9)
    noise = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(shazeer.torch, "randn_like", lambda clean: noise)
    y, aux = layer(x), intbmoe.aux_loss(layer)
    clean, raw = layer.router.weight[:4] @ x[0].t(), layer.router.weight[4:] @ x[0].t()
    deviation = torch.nn.functional.softplus(raw) + 0.01
    noisy = clean + deviation * noise.t()  # (E, T)
    gates, wins = torch.zeros(9, 4, dtype=torch.float64), torch.zeros(9, 4, dtype=torch.float64)
    for t in range(9):
        order = noisy[:, t].argsort(descending=True)
        gates[t, order[:2]] = noisy[order[:2], t].softmax(-1)
        for e in range(4):
            others = [noisy[i, t] for i in range(4) if i != e]
            threshold = sorted(others, reverse=True)[1]  # the k-th largest without e
            wins[t, e] = Normal(0, 1).cdf((clean[e, t] - threshold) / deviation[e, t])
    outputs = layer.experts.batch(x.expand(4, -1, -1))
    torch.testing.assert_close(y[0], torch.einsum("te,etd->td", gates, outputs), rtol=0, atol=1e-12)
    expected = 0.3 * variation(gates.sum(0)) + 0.7 * variation(wins.sum(0))
    torch.testing.assert_close(aux, expected, rtol=0, atol=1e-12)


def test_it_starts_even_and_all_experts_have_no_load_loss():
    assert (intbmoe.create("shazeer", 8, 12).router.weight == 0).all()
    layer = make("shazeer", top_k=4)
    layer(tokens(1, 5))
    assert set(layer.statistics.record.losses) == {"importance"}


def test_noise_is_for_training_only():
    layer, x = make("shazeer"), tokens(2, 5)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    with pytest.raises(ValueError, match="noise=-1"):
        make("shazeer", noise=-1)
