"""How long MASS may grow and how wide its windows are: the authors' shares of the run, resolved once and kept."""

import warnings

import pytest
import torch
from scripted_mass import UP, make, scripted

import intbmoe
from intbmoe.budget import match_budget

OPEN = {"warmup": None, "window": None, "expansion_steps": None}


def planned(total, **options):
    layer = make(**{**OPEN, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        intbmoe.plan_steps(layer, total)
    return layer


@pytest.mark.parametrize(
    ("domain", "total", "expected"),
    [
        ("vision", 125_000, [6250, 11_250, 12_500]),
        ("vision", 1000, [100, 200, 100]),
        ("language", 942, [47, 84, 94]),
        ("language", 100, [30, 60, 10]),
    ],
)
def test_steps_follow_the_run_by_the_authors_rules(domain, total, expected):
    layer = planned(total, domain=domain)
    assert layer.plan.tolist() == expected
    assert layer.norms.shape == layer.scores.shape == (4, expected[1])


def test_numbers_are_literal_and_shares_can_be_set():
    assert planned(50_000, window=200).plan.tolist() == [2500, 200, 5000]
    assert planned(50_000, warmup=7, expansion_steps=11).plan.tolist() == [7, 4500, 11]
    assert planned(1000, warmup_share=0.2, window_share=0.3, expansion=0.5).plan.tolist() == [200, 300, 500]


def test_the_task_says_which_script_is_followed():
    assert match_budget("mass", 8, 8, experts=4)["domain"] == "vision"
    assert match_budget("mass", 8, 8, experts=4, domain="language")["domain"] == "language"
    with pytest.raises(ValueError, match="domain='sound'"):
        match_budget("mass", 8, 8, experts=4, domain="sound")


@pytest.mark.parametrize(("domain", "checks"), [("vision", 1), ("language", 0)])
def test_the_first_added_expert_is_checked_on_images_only(domain, checks):
    layer = make(window=8, warmup=3, similarity=1e-6, domain=domain)
    calls = []

    def loss():
        calls.append(int(layer.active.sum()))
        return torch.tensor(1.0)

    scripted(layer, UP, reevaluate=loss)
    scripted(layer, [[1.0] * 4] * 20 + [[10.0, 1.0, 1.0, 1.0]] * 8, reevaluate=loss)
    assert len(calls) >= 2 if checks else calls == []


def test_growth_ends_with_the_phase_and_its_windows_go():
    layer = planned(10 * (len(UP) - 1), window=8, warmup=3, similarity=1e-6)
    scripted(layer, UP)
    assert int(layer.active.sum()) == 2
    assert layer.norms.shape == layer.scores.shape == (4, 0)
    in_time = planned(10 * len(UP), window=8, warmup=3, similarity=1e-6)
    scripted(in_time, UP)
    assert int(in_time.active.sum()) == 3
    assert in_time.norms.shape == (4, 8)


def test_a_loop_that_does_not_say_its_length_is_warned_once():
    layer = make(**OPEN)
    with pytest.warns(UserWarning, match=r"first 1000 steps.*intbmoe\.plan_steps\(model, total_steps\)"):
        scripted(layer, UP[:1])
    assert layer.plan.tolist() == [100, 200, 1000]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scripted(layer, UP[1:2])
        scripted(make(), UP[:1])  # every number given
        scripted(planned(10_000), UP[:1])


def test_a_phase_shorter_than_a_window_is_told():
    with pytest.warns(UserWarning, match="run of 315 steps: its phase of 31 .* window of 200"):
        intbmoe.plan_steps(make(**OPEN), 315)


def test_a_run_that_goes_on_keeps_its_steps():
    begun = planned(10_000)
    scripted(begun, UP[:2])
    intbmoe.plan_steps(begun, 77)
    assert begun.plan.tolist() == [500, 900, 1000]
    resumed = make(**OPEN)
    resumed.load_state_dict(begun.state_dict())
    assert resumed.plan.tolist() == [500, 900, 1000]
    scripted(begun, UP[2:5])
    scripted(resumed, UP[2:5])
    assert resumed.norms.shape == (4, 900)
    assert torch.equal(resumed.norms_seen, begun.norms_seen)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_without_a_plan_loads_with_the_steps_of_its_time(assign):
    old = {name: value for name, value in make().state_dict().items() if name != "plan"}
    assert old["norms"].shape == (4, 200)
    layer = make(**OPEN, domain="language")
    layer.load_state_dict(old, assign=assign)
    assert layer.plan.tolist() == [50, 200, 1000]
    assert layer.norms.shape == (4, 200)


def test_a_number_of_steps_is_checked():
    with pytest.raises(ValueError, match="total=0"):
        intbmoe.plan_steps(make(), 0)
