"""MASS against a loop written from its equations, its loss, and its state in training."""

import copy

import pytest
import torch
from scripted_mass import DIM, make, tokens

import intbmoe
from small_methods import expert


def reference(layer, x):
    rows, chosen = [], []
    opened = layer.active.nonzero().flatten().tolist()
    for xt in x.reshape(-1, DIM):
        r = torch.softmax(layer.router.weight[opened] @ xt, 0)
        mass, picked = 0.0, []
        for place in sorted(range(len(opened)), key=lambda i: -r[i].item()):
            if mass >= layer.config.top_p:
                break
            picked.append(place)
            mass += r[place].item()
        total = sum(r[i] for i in picked) if layer.config.renormalize else 1.0
        rows.append(sum(r[i] / total * expert(layer, opened[i], xt) for i in picked))
        chosen.append([opened[i] for i in picked])
    return torch.stack(rows).view(x.shape), chosen


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("top_p", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("renormalize", [True, False])
def test_outputs_and_gradients_equal_the_loop(kind, top_p, renormalize):
    layer = make(expert=kind, top_p=top_p, renormalize=renormalize, experts=5, initial_experts=4, redundancy=0.0)
    with torch.no_grad():
        layer.router.weight.mul_(2)
    twin = copy.deepcopy(layer)
    x1, x2 = tokens(2, 8).requires_grad_(), tokens(2, 8).requires_grad_()
    with intbmoe.record_routing(layer) as log:
        y = layer(x1)
    expected, chosen = reference(twin, x2)
    assert [[e for e in row if e >= 0] for row in log[""].ids.tolist()] == chosen
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x1.grad, x2.grad, rtol=1e-10, atol=1e-12)
    for (name, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_the_chosen_mass_is_the_least_that_reaches_p(training):
    layer = make(experts=8, initial_experts=6, top_p=0.7, renormalize=False).train(training)
    with torch.no_grad():
        layer.router.weight.mul_(3)
    with intbmoe.record_routing(layer) as log:
        layer(tokens(1, 200))
    weights, count = log[""].weights, (log[""].ids >= 0).sum(1)
    assert (weights.sum(1) >= 0.7).all()
    assert (weights.sum(1) - weights.gather(1, count.unsqueeze(1) - 1).squeeze(1) < 0.7).all()
    assert len(count.unique()) > 2
    assert log[""].ids.max() == 5


def test_a_uniform_router_over_four_takes_two_of_equal_weight():
    layer = make(experts=6, initial_experts=4)
    with torch.no_grad():
        layer.router.weight.zero_()
    with intbmoe.record_routing(layer) as log:
        layer(tokens(1, 3))
    assert log[""].ids.tolist() == [[0, 1, -1, -1, -1, -1]] * 3
    assert log[""].weights.tolist() == [[0.5, 0.5, 0, 0, 0, 0]] * 3


def test_redundancy_loss_by_hand():
    layer = make(experts=4, initial_experts=4, expansion_steps=2)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, :2] = torch.tensor([[1.0, 0.0], [3.0, 3.0], [2.0, 0.0], [0.0, 4.0]])
        layer.source.copy_(torch.tensor([-1, 0, 0, 1]))  # cos² = 1/2, 1, 1/2
    for expected in (0.02, 0.02, 0.0):  # the phase ends after two steps
        layer(tokens(1, 2))
        loss = intbmoe.aux_loss(layer)
        assert loss.item() == pytest.approx(expected)
        intbmoe.after_step(layer)


def trained(layer, optimizer, batches, accumulation=1):
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.chunk(accumulation):
            ((10 * layer(part).square().mean() + intbmoe.aux_loss(layer)) / accumulation).backward()
        intbmoe.before_step(layer, optimizer)
        optimizer.step()
        intbmoe.after_step(layer, optimizer)


EAGER = {"window": 4, "warmup": 2, "significance": 0.45, "similarity": 1.0, "experts": 6}


def test_resuming_in_the_middle_of_a_window_changes_nothing():
    batches = [tokens(2, 6, seed=s) for s in range(12)]
    whole = make(**EAGER)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05)
    trained(whole, optimizer, batches[:5])
    before = whole.active.clone()
    resumed = make(**EAGER)
    other = torch.optim.AdamW(resumed.parameters(), lr=0.05)
    resumed.load_state_dict(whole.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    trained(whole, optimizer, batches[5:])
    trained(resumed, other, batches[5:])
    assert not torch.equal(whole.active, before)  # so there was something to get wrong
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_one_sample_a_step_under_accumulation():
    batches = [tokens(4, 5, seed=s) for s in range(10)]
    whole, parts = make(**EAGER), make(**EAGER)
    trained(whole, torch.optim.SGD(whole.parameters(), lr=0.05), batches)
    trained(parts, torch.optim.SGD(parts.parameters(), lr=0.05), batches, accumulation=2)
    assert whole.steps == parts.steps == 10
    assert int(whole.active.sum()) > whole.config.start  # so there were decisions to agree on
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), rtol=1e-9, atol=1e-12)


def test_active_parameters_follow_the_last_step():
    layer = make(experts=6, initial_experts=4)
    one, router = layer.experts.expert_parameters(), 6 * DIM
    assert layer.active_parameters() == router + 2 * one  # half the mass of four
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 0] = 50.0
    x = torch.zeros(1, 3, DIM, dtype=torch.float64)
    x[0, 0, 0] = 1.0  # one expert for the first, two of four equal ones for the others
    trained(layer, torch.optim.SGD(layer.parameters(), lr=0.0), [x])
    assert float(layer.mean_choices) == pytest.approx(5 / 3)
    assert layer.active_parameters() == router + round(5 / 3 * one)


def test_before_step_without_gradients_is_an_error_and_frozen_experts_are_left_alone():
    layer = make()
    with pytest.raises(RuntimeError, match=r"before_step after loss.backward"):
        intbmoe.before_step(layer, None)
    layer.experts.requires_grad_(False)
    intbmoe.before_step(layer, None)
    assert (layer.norms_seen == 0).all()


def test_bad_options_are_named():
    bad = {"top_p": 0.0, "window": 1, "warmup": 0, "significance": 1.0, "similarity": 0.0, "patience": -1}
    for option, value in bad.items():
        with pytest.raises(ValueError, match=f"{option}="):
            make(**{option: value})
