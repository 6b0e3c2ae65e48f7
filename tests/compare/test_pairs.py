"""Methods compared in pairs: properties that any such test must have, on outcomes with a known distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, t, ttest_ind, ttest_rel

from intbmoe.compare import pairs
from intbmoe.compare.pairs import Spread, compare_in_pairs, find_unsteady, holm, judge, mcnemar, spreads
from intbmoe.compare.table import difference_notes

EXAMPLES = 400


def accuracy(sums):
    return sums["hit"] / sums["count"]


def loss(sums):
    return sums["loss"] / sums["count"]


def outcomes(random, rate=0.5, hardness=None, gain=0.0):
    """Losses that share the difficulty of the examples, and hits that do not."""
    hardness = np.zeros(EXAMPLES) if hardness is None else hardness
    return {
        "count": np.ones(EXAMPLES),
        "hit": (random.random(EXAMPLES) < rate).astype(float),
        "loss": hardness - gain + 0.1 * random.standard_normal(EXAMPLES),
    }


@pytest.fixture
def random():
    return np.random.default_rng(7)


def test_identical_outcomes_differ_by_nothing(random):
    one = outcomes(random)
    found = compare_in_pairs({"dense": {0: one}, "same": {0: dict(one)}}, "dense", accuracy)["same"]
    assert (found.value, found.interval_95, found.p) == (0, 0, 1)


def test_exchanging_the_two_turns_the_sign_and_nothing_else(random):
    runs = {"a": {s: outcomes(random, 0.4) for s in range(3)}, "b": {s: outcomes(random, 0.5) for s in range(3)}}
    one, other = compare_in_pairs(runs, "a", accuracy)["b"], compare_in_pairs(runs, "b", accuracy)["a"]
    assert one.value == pytest.approx(-other.value)
    assert (one.interval_95, one.p) == pytest.approx((other.interval_95, other.p))


def test_what_the_examples_have_in_common_does_not_blur_a_difference(random):
    hard = 3 * random.standard_normal(EXAMPLES)
    runs = {"dense": {0: outcomes(random, hardness=hard)}, "better": {0: outcomes(random, hardness=hard, gain=0.03)}}
    found = compare_in_pairs(runs, "dense", loss)["better"]
    one, other = runs["dense"][0]["loss"], runs["better"][0]["loss"]
    expected = ttest_rel(other, one)
    assert found.value == pytest.approx(other.mean() - one.mean())
    assert found.p == pytest.approx(expected.pvalue, rel=0.5)
    assert found.interval_95 == pytest.approx(1.96 * np.std(other - one, ddof=1) / EXAMPLES**0.5, rel=0.1)
    assert found.interval_95 < 0.1 * 1.96 * np.std(one) / EXAMPLES**0.5, "each alone is far less certain"


def test_intervals_hold_the_truth_as_often_as_they_say(monkeypatch):
    """Three seeds that differ more than the examples do: a bootstrap over three seeds would fail here."""
    monkeypatch.setattr(pairs, "RESAMPLES", 100)
    random, held, tries = np.random.default_rng(3), 0, 200
    for _ in range(tries):
        shifts = 0.05 * random.standard_normal(6)
        found = {"dense": {}, "other": {}}
        for place, shift in enumerate(shifts):
            found[("dense", "other")[place % 2]][place // 2] = outcomes(random, gain=shift)
        difference = compare_in_pairs(found, "dense", loss)["other"]
        held += abs(difference.value) <= difference.interval_95
    assert held / tries == pytest.approx(0.95, abs=0.04)


def test_more_pairs_lend_each_other_their_spread(random):
    runs = {name: {s: outcomes(random, gain=0.05 * random.standard_normal()) for s in range(3)} for name in "abcdef"}
    runs["single"] = {0: outcomes(random)}
    found = compare_in_pairs(runs, "a", loss)
    alone = compare_in_pairs({name: runs[name] for name in "ab"}, "a", loss)["b"]
    assert found["single"].over_seeds, "one seed gives no claim without the spread of the others"
    assert found["single"].interval_95 > max(found[name].interval_95 for name in "bcdef")
    assert found["b"].value == alone.value
    first = {name: {0: runs[name][0]} for name in ("a", "single")}
    assert not compare_in_pairs(first, "a", loss)["single"].over_seeds


def test_one_seed_of_hits_is_mcnemars(random):
    runs = {"dense": {0: outcomes(random, 0.4)}, "other": {0: outcomes(random, 0.5)}}
    found = compare_in_pairs(runs, "dense", accuracy)["other"]
    assert found.p == mcnemar(runs["other"][0]["hit"], runs["dense"][0]["hit"])


def test_only_seeds_that_both_have_are_compared(random):
    runs = {"dense": {0: outcomes(random, 0.4)}, "other": {1: outcomes(random, 0.1), 0: outcomes(random, 0.5)}}
    runs["elsewhere"] = {2: outcomes(random)}
    found = compare_in_pairs(runs, "dense", accuracy)
    assert list(found) == ["other"]
    assert found["other"].seeds == 1
    assert found["other"].value == pytest.approx(runs["other"][0]["hit"].mean() - runs["dense"][0]["hit"].mean())


def test_mcnemar_is_exact():
    one, other = np.array([1, 1, 1, 1, 1, 0, 1, 0]), np.array([0, 0, 0, 0, 0, 0, 1, 0])
    assert mcnemar(one, other) == mcnemar(other, one) == pytest.approx(2 * 0.5**5)
    assert mcnemar(one, one) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_no_correction_and_bonferronis(chances):
    found = holm(chances)
    for p, corrected in zip(chances, found, strict=True):
        assert p <= corrected <= min(1, len(chances) * p) + 1e-15
    assert sorted(range(len(found)), key=lambda i: (found[i], chances[i])) == sorted(
        range(len(found)), key=lambda i: (chances[i], chances[i])
    )
    assert all(corrected >= p - 1e-12 for corrected, p in zip(found, false_discovery_control(chances), strict=True))


def test_the_spread_within_groups_leaves_their_means_out():
    shared = Spread(pytest.approx(2**0.5), 2, own=False)
    assert spreads([[1.0, 3.0], [101.0, 103.0], [7.0], []]) == [shared] * 4
    assert spreads([[1.0], [5.0]]) == [None, None]


def test_one_method_that_varies_does_not_blur_the_others(random):
    steady = [list(row) for row in random.standard_normal((8, 3))]
    wild = [0.0, 0.1, 40.0]
    assert not find_unsteady(steady)
    assert find_unsteady([*steady, wild, [7.0], []]) == {8}
    assert find_unsteady([*steady, wild, [0.0, 0.1, 4000.0]]) == {8, 9}, "the wider one hides the other at first"
    assert find_unsteady([*steady, [0.0, 40.0]]) == {8}
    wide = [*steady, [0.0, 0.1, 5.0]]
    assert find_unsteady(wide) == find_unsteady([*wide, *[[7.0]] * 1000]) == {8}, "single values say nothing"
    found = spreads([*steady, wild, [7.0]])
    assert found[:8] == spreads(steady)
    assert found[8] == Spread(pytest.approx(np.std(wild, ddof=1)), 2, own=True)
    assert found[9] == found[0]


def test_two_methods_cannot_tell_which_of_them_varies():
    first, other, wild = [0.0, 0.1, 0.2], [0.0, 0.1, 0.25], [0.0, 0.1, 400.0]
    assert find_unsteady([first, wild]) == set()
    assert find_unsteady([first, other, wild]) == {2}


def test_methods_that_tie_on_few_examples_do_not_make_another_unsteady():
    assert find_unsteady([[0.1] * 3, [0.3] * 3, [0.7] * 3, [0.1, 0.1, 0.100001]]) == set()


def test_equal_spreads_are_seldom_called_unsteady(random):
    found = [find_unsteady(list(groups)) for groups in random.standard_normal((2000, 10, 3))]
    assert sum(map(bool, found)) / len(found) == pytest.approx(pairs.UNSTEADY, abs=0.007)


def test_an_unknown_spread_is_not_taken_for_zero():
    known = Spread(0.1, 4, own=False)
    assert not judge(np.array([0.5]), 1, (known, None)).over_seeds
    assert not judge(np.array([0.5]), 1, (None, known)).over_seeds


def test_two_methods_are_compared_as_student_does(random):
    one, other = random.standard_normal((2, 3))
    found = judge(np.array([one.mean() - other.mean()]), 3, tuple(spreads([one, other])))
    assert found.p == pytest.approx(ttest_ind(one, other).pvalue)


@pytest.mark.parametrize("turn", [1, -1])
def test_an_unsteady_method_is_compared_as_welch_does(random, turn):
    steady, wild = random.standard_normal((5, 3)), 40 * random.standard_normal(3)
    spread = spreads([*steady, wild])[-2:][::turn]
    found = judge(np.array([steady[4].mean() - wild.mean()]), 3, tuple(spread))
    first, second = np.mean(steady.var(axis=1, ddof=1)) / 3, wild.var(ddof=1) / 3
    freedom = (first + second) ** 2 / (first**2 / 10 + second**2 / 2)
    assert found.interval_95 == pytest.approx(t.ppf(0.975, freedom) * (first + second) ** 0.5)


def test_an_unsteady_method_does_not_widen_the_intervals_of_the_others(random):
    runs = {name: {s: outcomes(random, gain=0.02 * random.standard_normal()) for s in range(3)} for name in "abcdef"}
    wild = {"wild": {s: outcomes(random, gain=gain) for s, gain in enumerate((0.0, 3.0, -2.0))}}
    without, found = compare_in_pairs(runs, "a", loss), compare_in_pairs(runs | wild, "a", loss)
    for name in "bcdef":
        assert found[name].interval_95 == pytest.approx(without[name].interval_95)
    assert found["wild"].interval_95 > 20 * found["b"].interval_95
    assert compare_in_pairs(runs | wild, "wild", loss)["a"].interval_95 == pytest.approx(found["wild"].interval_95)


def test_other_examples_are_refused(random):
    other = {name: values[:-1] for name, values in outcomes(random).items()}
    with pytest.raises(ValueError, match="so they cannot be compared"):
        compare_in_pairs({"dense": {0: outcomes(random)}, "other": {0: other}}, "dense", accuracy)


@pytest.mark.parametrize(("over_seeds", "covered"), [(True, "seeds"), (False, "training runs is unknown")])
def test_a_note_says_what_an_interval_covers(over_seeds, covered):
    found = {"baseline": "dense", "examples": EXAMPLES, "over_seeds": over_seeds}
    (note,) = difference_notes([{"label": "dense", "title": "Dense"}, {"label": "other", "difference": found}])
    assert "(this covers the choice of test examples" in note
    assert f"{covered}). *: " in note
