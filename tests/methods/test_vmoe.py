"""V-MoE: against a loop over tokens, both losses by hand, noise, capacity and batch priority routing."""

import math

import pytest
import torch

import intbmoe
from intbmoe.methods.vmoe import VMoE
from ranks import run_ranks
from small_methods import expert

DIM, HIDDEN = 6, 5


def make(**options):
    torch.manual_seed(1)
    return VMoE(DIM, HIDDEN, **{"experts": 4, **options}).double()


def tokens(*shape, seed=2):
    return torch.randn(*shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def variation(values):
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def naive(layer, x, mask, noise):
    """The equations of the file, token by token, for one draw of standard normal noise: output and the two losses."""
    c = layer.config
    y = torch.zeros_like(x)
    importance, load = [0.0] * c.experts, [0.0] * c.experts
    for b, t in mask.nonzero().tolist():
        clean = layer.router.weight @ x[b, t]
        noisy = clean + noise[b, t] * c.noise / c.experts
        gates = noisy.exp() / noisy.exp().sum()
        chosen = sorted(range(c.experts), key=lambda e: (-noisy[e].item(), e))[: c.top_k]
        y[b, t] = sum(gates[e] * expert(layer, e, x[b, t]) for e in chosen)
        threshold = noisy[chosen[-1]]
        for e in range(c.experts):
            importance[e] = importance[e] + clean[e].exp() / clean.exp().sum()
            required = (threshold - clean[e]) * c.experts / c.noise
            load[e] = load[e] + 1 - (1 + torch.erf(required / math.sqrt(2))) / 2
    return y, c.importance * variation(importance), c.load * variation(load)


@pytest.mark.parametrize("options", [{}, {"top_k": 1, "noise": 3.0}, {"experts": 3, "top_k": 3}], ids=str)
def test_outputs_losses_and_gradients_agree_with_a_loop(options, monkeypatch):
    layer = make(importance=0.7, load=0.4, **options)
    x = tokens(3, 5).requires_grad_()
    mask = torch.rand(3, 5) > 0.3
    noise = torch.randn(3, 5, layer.config.experts, dtype=torch.float64)
    monkeypatch.setattr(torch, "randn_like", lambda logits: noise.view_as(logits))
    results = []
    for form in ("layer", "naive"):
        if form == "layer":
            y = layer(x, mask)
            losses = tuple(layer.statistics.record.losses[name] for name in ("importance", "load"))
        else:
            y, *losses = naive(layer, x, mask, noise)
        total = y.square().sum() + sum(losses)
        results.append((y, tuple(losses), torch.autograd.grad(total, [x, *layer.parameters()])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def test_evaluation_is_the_masked_dense_sum_without_noise_or_losses():
    layer = make().eval()
    x = tokens(2, 5)
    gates = (x @ layer.router.weight.t()).softmax(-1)
    kept = gates * (gates >= gates.sort(-1, descending=True).values[..., 1:2])
    dense = torch.stack([expert(layer, e, x) for e in range(4)], -1)
    torch.testing.assert_close(layer(x), (dense * kept.unsqueeze(-2)).sum(-1))
    assert layer.statistics.record is None


def test_noise_is_in_training_only():
    layer, x = make(noise=5.0), tokens(2, 30)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    quiet = make(noise=0.0)
    assert torch.equal(quiet(x), quiet(x))


def test_equal_clean_logits_cost_nothing():
    """Every expert is as important, and as likely to win, as any other: (b) of the facts, exactly."""
    layer = make(importance=1.0, load=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()
    layer(tokens(2, 50))
    assert intbmoe.aux_loss(layer).item() < 1e-25


def test_losses_of_a_collapsed_router_by_hand():
    """All gates on one of 4 experts: mean 1/4, variance 3/16, CV² = 3; the load likewise, with τ its noisy logit."""
    layer = make(importance=1.0, load=0.0, top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()[2] = 1000.0
    x = torch.ones(1, 8, DIM, dtype=torch.float64)
    layer(x)
    assert layer.statistics.record.losses["importance"].item() == pytest.approx(3)
    layer = make(importance=0.0, load=1.0, top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()[2] = 1000.0
    layer(x)
    assert layer.statistics.record.losses["load"].item() == pytest.approx(3)


def test_without_noise_there_is_no_load_loss():
    layer = make(noise=0.0)
    layer(tokens(2, 5))
    assert set(layer.statistics.record.losses) == {"importance"}


def _losses(rank, world):
    noise = torch.randn(4, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.randn_like = lambda logits: noise.chunk(world)[rank].reshape(logits.shape)
    layer = make(importance=0.7, load=0.4)
    layer(tokens(4, 6).chunk(world)[rank])
    loss = intbmoe.aux_loss(layer)
    loss.backward()
    return loss.detach(), layer.router.weight.grad


def test_losses_with_noise_are_global(monkeypatch):
    monkeypatch.setattr(torch, "randn_like", torch.randn_like)  # restores it afterwards
    loss, grad = _losses(0, 1)
    ranks = run_ranks(2, _losses)
    for rank_loss, _ in ranks:
        torch.testing.assert_close(rank_loss, loss)
    torch.testing.assert_close((ranks[0][1] + ranks[1][1]) / 2, grad)  # as data parallelism averages them


def routed(layer, x, mask=None):
    with intbmoe.record_routing(layer) as log:
        layer(x, mask)
    return log[""].ids.view(*x.shape[:2], -1), log[""].weights.view(*x.shape[:2], -1)


def place(wanted, capacity, priority):
    """Who gets a place in one sequence, by a plain loop: choice by choice, with tokens in order of priority."""
    places, kept = {}, torch.full_like(wanted, -1)
    order = sorted(range(len(wanted)), key=lambda t: (-priority[t].item(), t))
    for rank in range(wanted.shape[1]):
        for t in order:
            e = wanted[t, rank].item()
            if e >= 0 and places.get(e, 0) < capacity:
                places[e] = places.get(e, 0) + 1
                kept[t, rank] = e
    return kept


@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize(("factor", "multiple"), [(0.5, 1), (1.05, 1), (0.3, 4)])
def test_capacity_keeps_whom_the_loop_keeps(factor, multiple, priority):
    options = {"capacity_factor": factor, "eval_capacity_factor": factor, "capacity_multiple": multiple}
    layer = make(noise=0.0, priority_routing=priority, **options)
    x = tokens(3, 21)
    mask = torch.rand(3, 21) > 0.2
    wanted, gates = routed(make(noise=0.0), x, mask)
    kept, weights = routed(layer, x, mask)
    for b in range(3):
        capacity = math.ceil(math.ceil(factor * 2 * mask[b].sum().item() / 4) / multiple) * multiple
        order = gates[b, :, 0] if priority else torch.zeros(21)
        assert torch.equal(kept[b], place(wanted[b], capacity, order))
    assert torch.equal(weights, torch.where(kept < 0, 0, gates))
    intbmoe.aux_loss(layer)
    assert layer.statistics.pending["dropped"] == ((wanted >= 0) & (kept < 0)).sum()
    assert layer.statistics.pending["dropped"] > 0
    intbmoe.after_step(layer)
    assert intbmoe.load_statistics(layer)[""].dropped > 0


def test_priority_routing_keeps_the_largest_top_gates():
    """Of an expert's first choices the C with the largest gate survive; without priority, the first C."""
    options = {"eval_capacity_factor": 0.5, "capacity_multiple": 1}
    x = tokens(1, 24)
    wanted, gates = routed(make().eval(), x)
    first = wanted[0, :, 0]
    busiest = first.mode().values
    claimants = (first == busiest).nonzero().flatten()
    assert len(claimants) > 6  # C = 0.5 · 2 · 24 / 4
    for priority in (True, False):
        kept, _ = routed(make(priority_routing=priority, **options).eval(), x)
        survivors = (kept[0, :, 0] == busiest).nonzero().flatten().tolist()
        best = claimants[gates[0, claimants, 0].argsort(descending=True)[:6]] if priority else claimants[:6]
        assert survivors == sorted(best.tolist())


def test_a_padded_sequence_has_the_capacity_it_has_alone():
    layer = make(eval_capacity_factor=0.5, capacity_multiple=1).eval()
    x = tokens(1, 8)
    padded = torch.cat([x, tokens(1, 13)], 1)
    mask = (torch.arange(21) < 8).unsqueeze(0)
    torch.testing.assert_close(layer(padded, mask)[:, :8], layer(x), rtol=0, atol=1e-12)


def test_with_a_capacity_the_layer_is_not_causal():
    """An expert's capacity depends on how many tokens follow, so even first choices in order are not causal."""
    assert make().config.noncausal_reason() is None
    layer = make(top_k=1, eval_capacity_factor=0.5, capacity_multiple=1).eval()
    assert "capacity depends" in layer.config.noncausal_reason()
    x = tokens(4, 40)
    assert not torch.allclose(layer(x)[:, :20], layer(x[:, :20]), atol=1e-6)


def test_a_layer_with_capacity_compiles_whole():
    for factor in (0.5, 1.1):  # a second value is compiled as a symbol
        options = {"noise": 0.0, "capacity_factor": factor, "capacity_multiple": 1, "priority_routing": True}
        layer, x = make(**options), tokens(2, 12)
        mask = torch.arange(12).expand(2, 12) < torch.tensor([[12], [7]])
        compiled = torch.compile(layer, fullgraph=True, backend="eager")  # gradients: test_contract.py
        torch.testing.assert_close(compiled(x, mask), layer(x, mask))


def test_parameter_counts_are_those_of_the_paper_table():
    layer = VMoE(192, 768, experts=17)
    assert 3_937_960 + 4 * sum(p.numel() for p in layer.parameters()) == 24_070_312
    assert 3_937_960 + 4 * (layer.active_parameters() - 295_872) == 5_134_504


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, r"top_k=5.*experts \(4\)"),
        ({"noise": -0.1}, "noise=-0.1"),
        ({"load": float("inf")}, "load=inf"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"capacity_multiple": 0}, "capacity_multiple=0"),
        ({"priority_routing": True}, "priority_routing=True.*capacity"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
