"""DynMoE against a loop written from its equations, and what its pool does over steps."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import intbmoe
from small_methods import expert

DIM, HIDDEN = 6, 5


def make(**options):
    torch.manual_seed(0)
    return intbmoe.create("dynmoe", DIM, HIDDEN, **{"experts": 4, **options}).double()


def tokens(*shape, seed=1):
    return torch.randn(*shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reference(layer, x, mask):
    """Token by token, expert by expert; the straight-through gate is m + (1 − m) with the bracket held constant."""
    tau = layer.config.temperature
    rows, counts = [], []
    for xt, valid in zip(x.reshape(-1, DIM), mask.reshape(-1), strict=True):
        row, chosen, best = torch.zeros_like(xt), [], None
        for e in range(layer.config.experts):
            if not (layer.active[e] and valid):
                continue
            w = layer.embeddings[e]
            s = torch.sigmoid(tau * (xt @ w) / (xt.norm() * w.norm()))
            margin = s - torch.sigmoid(tau * layer.thresholds[e])
            best = (s.item(), e) if best is None or s.item() > best[0] else best
            if margin > 0:
                chosen.append((e, margin + (1 - margin).detach() if layer.training else 1.0))
        if not chosen and valid and not layer.training:
            chosen = [(best[1], 1.0)]
        for e, gate in chosen:
            row = row + gate / len(chosen) * expert(layer, e, xt)
        rows.append(row)
        counts.append(len(chosen))
    return torch.stack(rows).view(x.shape), counts


def steps(layer, batches, optimizer=None, accumulation=1):
    """One optimizer step per batch, cut into ``accumulation`` parts."""
    optimizer = optimizer or torch.optim.SGD(layer.parameters(), lr=0.0)
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.chunk(accumulation):
            ((layer(part).square().sum() + intbmoe.aux_loss(layer)) / accumulation).backward()
        intbmoe.before_step(layer, optimizer)
        optimizer.step()
        intbmoe.after_step(layer, optimizer)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_outputs_and_gradients_equal_the_loop(kind, training, temperature):
    layer = make(expert=kind, temperature=temperature, initial_experts=3).train(training)
    with torch.no_grad():
        layer.thresholds.copy_(torch.tensor([0.2, -0.1, 0.05, -9.0]))
        layer.embeddings.mul_(torch.tensor([[1.0], [0.3], [2.0], [1.0]]))
    x, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    twin = copy.deepcopy(layer)
    with intbmoe.record_routing(layer) as log:
        y = layer(x1, mask)
    expected, counts = reference(twin, x2, mask)
    assert (log[""].ids >= 0).sum(1).tolist() == counts
    assert len(set(counts)) >= 3  # several numbers of experts, the uncovered tokens' among them
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x1.grad, x2.grad, rtol=1e-10, atol=1e-12)
    for (name, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
        grad = torch.zeros_like(q) if q.grad is None else q.grad
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-12, msg=name)


def test_the_router_learns_from_chosen_pairs_in_training_and_not_at_all_in_evaluation():
    layer = make(initial_experts=3)
    x = (layer.embeddings.detach() * torch.tensor([[1.0], [-2.0], [0.5], [1.0]])).sum(0).view(1, 1, DIM)
    chosen = {0, 2}  # 1 points away, 3 is closed
    layer(x).square().sum().backward()
    for e in range(4):
        assert bool((layer.thresholds.grad[e] != 0).all()) == (e in chosen)
        assert bool((layer.embeddings.grad[e] != 0).any()) == (e in chosen)
    layer.zero_grad()
    layer.eval()(x).square().sum().backward()
    assert (layer.embeddings.grad == 0).all()
    assert (layer.thresholds.grad == 0).all()


def test_with_zero_thresholds_selection_is_a_positive_cosine_whatever_the_length():
    layer = make(initial_experts=3).train()
    x = tokens(1, 50)
    with intbmoe.record_routing(layer) as log:
        layer(x)
    expected = (x[0] @ layer.embeddings.t() > 0) & layer.active
    found = F.one_hot(log[""].ids + 1, 5).sum(1)[:, 1:].bool()
    assert torch.equal(found, expected)
    with intbmoe.record_routing(layer) as scaled:
        layer(x * 37.5)
    assert torch.equal(scaled[""].ids, log[""].ids)
    torch.testing.assert_close(log[""].weights.sum(1), expected.any(1).double())


def test_uncovered_tokens_give_zero_in_training_and_their_best_expert_in_evaluation():
    layer = make()
    with torch.no_grad():
        layer.thresholds.fill_(9.0)
    x = tokens(1, 6)
    assert (layer(x) == 0).all()
    layer.eval()
    best = (x[0] @ layer.embeddings[:2].t()).argmax(1)
    with intbmoe.record_routing(layer) as log:
        y = layer(x)
    assert log[""].ids[:, 0].tolist() == best.tolist()
    assert (log[""].ids[:, 1:] == -1).all()
    expected = torch.stack([expert(layer, e, xt) for e, xt in zip(best.tolist(), x[0], strict=True)])
    torch.testing.assert_close(y[0], expected)


def test_auxiliary_loss_by_hand():
    layer = make(initial_experts=3)
    layer(tokens(1, 3))
    assert intbmoe.aux_loss(layer).item() == pytest.approx(0.01 * 1.0)  # orthonormal: no excess, length 1
    with torch.no_grad():
        layer.embeddings.zero_()
        layer.embeddings[:, 0] = torch.tensor([2.0, 3.0, 0.0, 5.0])  # 0 and 1 parallel; 3, closed, parallel too
        layer.embeddings[2, 1] = 1.0
    layer(tokens(1, 3))
    expected = 0.01 * (math.sqrt(2) + (2 + 3 + 1 + 5) / 4)
    assert intbmoe.aux_loss(layer).item() == pytest.approx(expected)


def test_the_deepspeed_terms_by_hand():
    layer = make(experts=2, initial_experts=2, load_balance=1.0, efficiency=1.0)
    with torch.no_grad():
        layer.embeddings.copy_(torch.eye(DIM)[:2])
    x = torch.zeros(1, 4, DIM, dtype=torch.float64)
    x[0, :, 0] = torch.tensor([1.0, 1.0, 1.0, -1.0])
    x[0, :, 1] = torch.tensor([1.0, -1.0, -1.0, -1.0])  # chosen: both, 0, 0, none
    layer(x)
    share = torch.tensor([2.5, 0.5]) / 3  # of the three covered tokens
    load = torch.tensor([3.0, 1.0]) / 3
    expected = 0.01 * (1 + 4 * (share * load).mean().item() + 4 / 8)
    assert intbmoe.aux_loss(layer).item() == pytest.approx(expected)
    with torch.no_grad():
        layer.thresholds.fill_(9.0)
    layer(x)
    assert intbmoe.aux_loss(layer).item() == pytest.approx(0.01)


def one_sided(layer, count=12):
    """Tokens that only expert 0 of the open experts takes."""
    x = tokens(1, count, seed=5)
    basis = layer.embeddings.detach()
    coordinates = x @ basis.t()
    coordinates[..., 0].abs_().add_(1.0)
    coordinates[..., 1:].abs_().neg_()
    return coordinates @ basis


def test_a_starved_expert_is_closed_after_exactly_update_every_steps():
    layer = make(update_every=3, initial_experts=2)
    batch = one_sided(layer)
    for _ in range(2):
        steps(layer, [batch])
        assert layer.active.tolist() == [True, True, False, False]
    steps(layer, [batch])
    assert layer.active.tolist() == [True, False, False, False]
    assert layer.steps == 0
    assert (layer.activations == 0).all()
    layer.eval()
    with intbmoe.record_routing(layer) as log:
        layer(tokens(1, 40))
    assert set(log[""].ids.flatten().tolist()) == {0, -1}


def test_an_activation_anywhere_in_the_span_keeps_an_expert():
    layer = make(update_every=3, initial_experts=2)
    batch = one_sided(layer)
    both = torch.cat([batch, layer.embeddings[1].detach().view(1, 1, DIM)], dim=1)
    steps(layer, [both, batch, batch])
    assert layer.active.tolist() == [True, True, False, False]
    steps(layer, [batch, batch, batch])
    assert layer.active.tolist() == [True, False, False, False]


def test_uncovered_tokens_open_the_first_free_slot_and_select_it():
    layer = make(update_every=2, initial_experts=2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.0)
    covered = layer.embeddings[:2].detach().sum(0).expand(1, 4, DIM)  # keeps both open
    stray = -3 * layer.embeddings[:2].detach().sum(0) + 2 * layer.embeddings[3].detach()
    batch = torch.cat([covered, stray.view(1, 1, DIM)], dim=1)
    steps(layer, [batch], optimizer)
    slots = list(layer.parameters())
    for parameter in slots:
        optimizer.state[parameter]["exp_avg"].fill_(7.0)
    weights = layer.experts.up.weight[2].clone()
    steps(layer, [batch], optimizer)
    assert layer.active.tolist() == [True, True, True, False]
    torch.testing.assert_close(layer.embeddings[2].detach(), stray / stray.norm())
    assert layer.thresholds[2] == 0
    assert torch.equal(layer.experts.up.weight[2], weights)
    for parameter in slots:
        assert (optimizer.state[parameter]["exp_avg"][2] == 0).all()
        assert (optimizer.state[parameter]["exp_avg"][[0, 1, 3]] != 0).all()
        assert optimizer.state[parameter]["step"] == 2
    with intbmoe.record_routing(layer) as log:
        layer(stray.view(1, 1, DIM) * 0.1)
    assert log[""].ids[0].tolist() == [2, -1, -1, -1]


def test_a_full_pool_opens_nothing_and_an_idle_one_is_not_emptied():
    full = make(update_every=1, initial_experts=4)
    covered = full.embeddings.detach().sum(0).expand(1, 4, DIM)
    steps(full, [torch.cat([covered, -covered], dim=1)])
    assert full.active.all()

    idle = make(update_every=1, initial_experts=2)
    stray = -idle.embeddings[:2].detach().sum(0).view(1, 1, DIM)
    steps(idle, [stray])
    assert idle.active.tolist() == [True, True, True, False]
    steps(idle, [stray[:, :0]])  # a step without tokens activates nothing either
    assert idle.active.tolist() == [True, True, True, False]


def test_records_count_once_a_step_under_accumulation():
    batches = [tokens(4, 5, seed=s) for s in range(3)]
    whole, parts = make(update_every=4), make(update_every=4)
    steps(whole, batches)
    steps(parts, batches, accumulation=2)
    assert whole.steps == parts.steps == 3
    assert torch.equal(whole.activations, parts.activations)
    assert torch.equal(whole.active, parts.active)
    torch.testing.assert_close(whole.uncovered_input, parts.uncovered_input)
    uncovered = [x for b in batches for x in b.reshape(-1, DIM) if ((x @ whole.embeddings[:2].t()) <= 0).all()]
    torch.testing.assert_close(whole.uncovered_input, torch.stack(uncovered).sum(0))


def test_resuming_in_the_middle_of_a_span_changes_nothing():
    batches = [tokens(2, 6, seed=s) for s in range(7)]
    whole = make(update_every=3)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    steps(whole, batches[:4], optimizer)  # one step into the second span
    resumed = make(update_every=3)
    other = torch.optim.AdamW(resumed.parameters(), lr=0.01)
    resumed.load_state_dict(whole.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = whole.active.clone()
    steps(whole, batches[4:], optimizer)
    steps(resumed, batches[4:], other)
    assert not torch.equal(whole.active, before)  # so there was something to get wrong
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_active_parameters_follow_the_last_step():
    layer = make(initial_experts=2)
    one = layer.experts.expert_parameters()
    router = 4 * DIM + 4
    assert layer.active_parameters() == router + one
    batch = torch.stack([layer.embeddings[:2].sum(0), layer.embeddings[0], -layer.embeddings[:2].sum(0)]).detach()
    batch[1] -= 0.5 * layer.embeddings[1].detach()
    steps(layer, [batch.unsqueeze(0)])  # two experts, one, none (which evaluation makes one)
    assert float(layer.mean_choices) == pytest.approx(4 / 3)
    assert layer.active_parameters() == router + round(4 / 3 * one)
    assert layer.quantities().execution == 1


def test_bad_options_are_named():
    for option, value in (("temperature", 0.0), ("update_every", 0), ("auxiliary", float("nan"))):
        with pytest.raises(ValueError, match=f"{option}="):
            make(**{option: value})


# How long and how often the pool changes, and the authors' other gate.


def starving(layer, count):
    """The number of open experts after each of ``count`` steps in which only expert 0 is used."""
    batch, found = one_sided(layer), []
    for _ in range(count):
        steps(layer, [batch])
        found.append(int(layer.active.sum()))
    return found


@pytest.mark.parametrize(("total", "changes"), [(5, False), (6, True), (None, True)])
def test_the_pool_is_final_after_half_of_the_run(total, changes):
    layer = make(update_every=3, initial_experts=2)
    if total is not None:
        intbmoe.plan_steps(layer, total)
    assert starving(layer, 6)[-1] == (1 if changes else 2)
    assert (layer.activations == 0).all()


def test_adaptation_may_last_to_the_end_and_a_run_that_goes_on_keeps_its_end():
    layer = make(update_every=3, initial_experts=2, adaptation=1.0)
    intbmoe.plan_steps(layer, 3)
    assert starving(layer, 3) == [2, 2, 1]
    begun = make(update_every=3, initial_experts=2)
    intbmoe.plan_steps(begun, 8)
    steps(begun, [one_sided(begun)])
    intbmoe.plan_steps(begun, 2)
    resumed = make(update_every=3, initial_experts=2)
    resumed.load_state_dict(begun.state_dict())
    assert resumed.end == begun.end == 4
    assert starving(resumed, 2) == [2, 1]


def test_a_state_of_an_earlier_version_loads_and_has_no_end():
    old = {name: value for name, value in make().state_dict().items() if name not in ("taken", "end")}
    layer = make()
    intbmoe.plan_steps(layer, 10)
    layer.load_state_dict(old)
    assert layer.end == -1
    assert layer.taken == 0


def test_the_official_cadence_looks_at_the_second_of_three_spans():
    layer = make(update_every=2, cadence="official", initial_experts=2)
    both = layer.embeddings[:2].detach().sum(0).expand(1, 4, DIM)
    lone = one_sided(layer)
    found = []
    for batch in [both, both, lone, lone, lone, lone]:
        steps(layer, [batch])
        found.append(int(layer.active.sum()))
    assert found == [2, 2, 2, 1, 1, 1]  # use in the first span does not count
    assert layer.steps == 0
    ignored = make(update_every=2, cadence="official", initial_experts=2)
    steps(ignored, [lone, lone, lone, both])
    assert int(ignored.active.sum()) == 2  # used in the recorded span


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        return scores.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_the_tutel_gate_learns_its_temperature_and_divides_with_gradient():
    options = {"temperature": 10.0, "learn_temperature": True, "denominator_gradient": True, "auxiliary": 0.0}
    layer = make(initial_experts=3, **options)
    with torch.no_grad():
        layer.thresholds.copy_(torch.tensor([0.05, -0.1, 0.02, 0.0]))
    twin, x = copy.deepcopy(layer), tokens(1, 20)
    tau = twin.log_temperature.clamp(max=math.log(100)).exp()
    cosine = F.normalize(x[0], dim=1) @ F.normalize(twin.embeddings, dim=1).t()
    scores = Sign.apply(F.relu((tau * cosine).sigmoid() * twin.active - (tau * twin.thresholds).sigmoid()))
    assert {1, 2} <= set(scores.sum(1).int().tolist())
    weights = scores / scores.sum(1, keepdim=True).clamp(min=1e-12)
    expected = torch.einsum("te,etd->td", weights, twin.experts.batch(x.expand(4, -1, -1)))
    y = layer(x)
    torch.testing.assert_close(y[0], expected, rtol=0, atol=1e-12)
    (y.square().sum() + intbmoe.aux_loss(layer)).backward()  # which is 0 here
    expected.square().sum().backward()
    for (name, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=name)
    assert layer.log_temperature.grad.abs() > 1e-4
    plain = make(initial_experts=3, temperature=10.0)
    plain.load_state_dict({n: v for n, v in layer.state_dict().items() if n != "log_temperature"})
    assert torch.equal(plain(x), layer(x))  # the same numbers, other gradients
    plain(x).square().sum().backward()
    assert (plain.embeddings.grad - layer.embeddings.grad).abs().max() > 1e-4


def test_a_learned_temperature_stops_at_a_hundred_and_keeps_its_moments():
    layer = make(update_every=1, initial_experts=2, learn_temperature=True)
    with torch.no_grad():
        layer.log_temperature.fill_(math.log(1e4))
    assert layer._temperature().item() == pytest.approx(100.0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.0)
    steps(layer, [one_sided(layer)], optimizer)
    optimizer.state[layer.log_temperature]["exp_avg"].fill_(3.0)
    steps(layer, [-one_sided(layer)], optimizer)
    assert optimizer.state[layer.log_temperature]["exp_avg"] != 0  # it belongs to no slot, so it is never reset
