"""How the pool of MASS grows under scripted gradients, and what closes an expert again."""

import math
from collections import deque
from statistics import NormalDist, mean, stdev

import pytest
import torch
from scripted_mass import HIDDEN, UP, growing, scripted, tokens

import intbmoe
from small_methods import expert


def drift_steps(series, window, warmup, significance):
    """The steps at which a single expert with these norms drifts, computed with lists and the standard library."""
    norms, scores, found = deque(maxlen=window), deque(maxlen=window), []
    for step, norm in enumerate(series, 1):
        norms.append(norm)
        if step >= warmup:
            spread = stdev(norms) if len(set(norms)) > 1 else 0.0
            scores.append((norm - mean(norms)) / spread if spread else 0.0)
        p_value = 1 - NormalDist().cdf(sum(scores) / math.sqrt(window))
        if p_value < significance and len(norms) == window and step >= warmup:
            found.append(step)
    return found


def test_a_constant_gradient_norm_never_expands():
    layer = growing(significance=0.4)
    scripted(layer, [[0.1, 0.7, 0.0, 0.0]] * 30)  # 0.1: a mean of equal floats need not be that float
    assert layer.active.tolist() == [True, True, False, False]
    assert (layer.norms_seen[:2] == 30).all()


def test_a_step_up_in_the_norm_expands_when_the_statistic_says_so():
    series = [1.0] * 12 + [10.0] * 12
    expected = drift_steps(series, 8, 3, 0.01)[0]
    assert 13 < expected < 24
    layer = growing()
    rows = [[1.0, norm, 0.0, 0.0] for norm in series]
    scripted(layer, rows[: expected - 1])
    assert layer.active.tolist() == [True, True, False, False]
    scripted(layer, rows[expected - 1 : expected])
    assert layer.active.tolist() == [True, True, True, False]
    assert layer.source.tolist() == [-1, -1, 1, -1]
    assert layer.waited.tolist() == [expected, 0, 0, 0]
    assert layer.norms_seen.tolist() == [expected, expected, 0, 0]


def test_the_statistic_of_random_norms_equals_the_naive_one():
    generator = torch.Generator().manual_seed(7)
    series = (1 + torch.rand(40, generator=generator).double().cumsum(0) / 10).tolist()
    expected = drift_steps(series, 6, 4, 0.05)
    assert expected
    for step in (expected[0] - 1, expected[0]):
        layer = growing(window=6, warmup=4, significance=0.05, initial_experts=1)
        scripted(layer, [[norm, 0.0, 0.0, 0.0] for norm in series[:step]])
        assert int(layer.active.sum()) == (2 if step == expected[0] else 1)


def test_a_gradient_along_the_weights_does_not_expand():
    layer = growing(initial_experts=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for norm in [1.0] * 8 + [10.0] * 8:
        layer(tokens(1, 2))
        intbmoe.aux_loss(layer)
        for parameter in layer.parameters():
            parameter.grad = norm * parameter.detach().clone()
        intbmoe.before_step(layer, optimizer)
        intbmoe.after_step(layer, optimizer)
    assert int(layer.active.sum()) == 1


def test_the_script_drifts_at_its_last_step():
    assert drift_steps([row[1] for row in UP], 8, 3, 0.01) == [len(UP)]


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_expansion_copies_shares_gradients_out_and_forgets_moments(kind):
    layer = growing(expert=kind)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0, weight_decay=0.0)
    scripted(layer, UP[:-1], optimizer)
    for parameter in layer.parameters():
        optimizer.state[parameter]["exp_avg"].fill_(3.0)
    seen = {}

    class Spy(torch.optim.SGD):
        """Sees the gradients as the optimizer does, and keeps the other optimizer's state."""

        def step(self):
            seen.update({name: p.grad.clone() for name, p in layer.named_parameters()})

    spy = Spy(layer.parameters(), lr=0.0)
    spy.state = optimizer.state
    before = {}
    edit = type(layer)._duplicate

    def watch(self, *arguments):
        before.update({name: p.grad.clone() for name, p in self.named_parameters()})
        edit(self, *arguments)

    layer._duplicate = watch.__get__(layer)
    scripted(layer, UP[-1:], spy)
    assert layer.active.tolist() == [True, True, True, False]
    x = tokens(4)
    assert torch.equal(expert(layer, 1, x), expert(layer, 2, x))
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter[2], parameter[1]), name
        assert (optimizer.state[parameter]["exp_avg"][2] == 0).all(), name
        assert (optimizer.state[parameter]["exp_avg"][[0, 1, 3]] == 3).all(), name
        assert torch.equal(seen[name][[0, 3]], before[name][[0, 3]]), name
    first = "experts.gate.weight" if kind == "swiglu" else "experts.up.weight"
    for name, parameter in layer.named_parameters():
        kept, moved, whole, weight = seen[name][1], seen[name][2], before[name][1], parameter[1].detach()
        if name == first:
            expected = torch.zeros_like(whole)
            for unit in range(HIDDEN):  # stored (d, h): the weights into a hidden unit are a column
                w, g = weight[:, unit], whole[:, unit]
                expected[:, unit] = (g @ w) / (w @ w) * w
        elif name == "router.weight":
            expected = (whole @ weight) / (weight @ weight) * weight
        else:
            assert torch.equal(kept, whole), name
            assert (moved == 0).all(), name
            continue
        torch.testing.assert_close(kept, expected)
        assert torch.equal(moved, whole)
        assert not torch.allclose(kept, whole)


def test_duplicating_a_router_row_shares_its_probability():
    layer = growing(top_p=1.0, renormalize=False).eval()
    x = tokens(1, 5)
    with intbmoe.record_routing(layer) as log:
        layer(x)
    before = torch.zeros(5, 2).double().scatter(1, log[""].ids[:, :2], log[""].weights[:, :2])
    scripted(layer.train(), UP)
    with intbmoe.record_routing(layer) as log:
        layer(x)
    after = torch.zeros(5, 3).double().scatter(1, log[""].ids[:, :3], log[""].weights[:, :3])
    p = before[:, 1]
    torch.testing.assert_close(after, torch.stack([before[:, 0] / (1 + p), p / (1 + p), p / (1 + p)], dim=1))


def test_a_full_pool_and_the_end_of_the_phase_stop_growth():
    full = growing(experts=2, initial_experts=2)
    scripted(full, [row[:2] for row in UP])
    assert (full.norms_seen == 0).all()
    ended = growing(expansion_steps=len(UP) - 1)
    scripted(ended, UP)
    assert int(ended.active.sum()) == 2
    assert (ended.norms_seen[:2] == len(UP) - 1).all()
    in_time = growing(expansion_steps=len(UP))
    scripted(in_time, UP)
    assert int(in_time.active.sum()) == 3


def test_norms_that_are_not_finite_are_passed_over():
    clean, dirty = growing(), growing()
    scripted(clean, UP[:-1])
    scripted(dirty, UP[:5])
    scripted(dirty, [[float("inf"), float("nan"), 0.0, 0.0]])
    scripted(dirty, UP[5:-1])
    assert torch.equal(dirty.norms_seen, clean.norms_seen)
    scripted(dirty, UP[-1:])
    assert int(dirty.active.sum()) == 3


class Losses:
    """A scripted loss: ``gain`` is what the last open expert is worth. Notes which slots were open at each call."""

    def __init__(self, layer, gain):
        self.layer, self.gain, self.calls = layer, gain, []

    def __call__(self):
        torch.rand(1)
        assert not torch.is_grad_enabled()
        self.calls.append(int(self.layer.active.sum()))
        return torch.tensor(1.0 - (self.gain if len(self.calls) % 2 else 0.0))


def drift_again(layer, losses, expert=0):
    """Steps until ``expert`` drifts once more."""
    rows = [[1.0] * 4 for _ in range(20)] + [[10.0 if e == expert else 1.0 for e in range(4)] for _ in range(8)]
    before = len(losses.calls)
    for row in rows:
        if len(losses.calls) > before:
            break
        scripted(layer, [row], reevaluate=losses)


def test_a_useful_expert_stays_and_the_pool_grows():
    layer = growing()
    losses = Losses(layer, gain=0.1)
    scripted(layer, UP, reevaluate=losses)
    assert losses.calls == []  # no expert has been added yet that could be tested
    torch.manual_seed(11)
    state = torch.get_rng_state()
    drift_again(layer, losses)
    assert losses.calls == [3, 2]
    assert torch.equal(torch.get_rng_state(), state)  # the check uses another random generator
    assert layer.active.tolist() == [True] * 4
    assert layer.source.tolist() == [-1, -1, 1, 0]
    assert layer.patience == 3


@pytest.mark.parametrize("gain", [0.0, -0.5])
def test_useless_experts_are_replaced_until_patience_runs_out(gain):
    layer = growing(patience=2)
    losses = Losses(layer, gain=gain)
    scripted(layer, UP, reevaluate=losses)
    assert layer.source.tolist() == [-1, -1, 1, -1]
    drift_again(layer, losses)
    assert layer.source.tolist() == [-1, -1, 0, -1]  # replaced, not added
    assert layer.active.tolist() == [True, True, True, False]
    assert layer.patience == 1
    drift_again(layer, losses, expert=1)
    assert layer.source.tolist() == [-1, -1, 1, -1]
    assert layer.patience == 0
    assert not layer.final
    drift_again(layer, losses)
    assert layer.final
    assert layer.active.tolist() == [True, True, False, False]
    assert layer.source.tolist() == [-1] * 4
    assert losses.calls == [3, 2] * 3
    drift_again(layer, losses)
    assert int(layer.active.sum()) == 2
    assert len(losses.calls) == 6


def test_without_reevaluate_nothing_is_closed_and_check_after_spares_the_first():
    free = growing()
    scripted(free, UP)
    scripted(free, [[1.0] * 4] * 20 + [[10.0, 1.0, 1.0, 1.0]] * 8)
    assert free.active.all()
    spared = growing(check_after=1)
    losses = Losses(spared, gain=-1.0)
    scripted(spared, UP, reevaluate=losses)
    scripted(spared, [[1.0] * 4] * 20 + [[10.0, 1.0, 1.0, 1.0]] * 8, reevaluate=losses)
    assert spared.active.all()
    assert losses.calls == []
