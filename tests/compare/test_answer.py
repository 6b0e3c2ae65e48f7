"""Five-line answers, each with numbers computed by hand."""

import pytest

from intbmoe.compare.answer import answer_comparison, name_list
from intbmoe.compare.summary import confidence_intervals


def question(metric="accuracy", higher=True, left_out=0):
    about = {"recipe": "digits", "task": "vision", "metric": metric, "higher_is_better": higher}
    return {**about, "runs": [{"epochs": 2.0, "steps": 40}], "left_out": left_out * [{"path": "runs/digits/c/0"}]}


def contender(title, *values, flops=None, params=None):
    found = {"title": title, "values": list(values), "mean": sum(values) / len(values)}
    return {**found, "interval_95": confidence_intervals([values])[0], "flops": flops, "params": params}


def answer(asked, rows, floors=None):
    return answer_comparison({**asked, "rows": rows, "floors": floors or {}})


def texts(answer):
    assert len(answer.lines) == 5
    return [text for _, text in answer.lines]


def test_a_win():
    # Means 0.90 and 0.80. Two values d apart have t(1) · d / 2 = 12.706 · d / 2 as half width: 0.0127 and 0.0254.
    found = answer(
        question(),
        [contender("A", 0.798, 0.802, flops=2e6, params=100), contender("B", 0.899, 0.901, flops=5e6, params=50)],
    )
    what, on_what, won, how_much, how_sure = texts(found)
    assert found.verdict == "win"
    assert found.headline == "B wins on digits"
    assert found.leaders == ("B",)
    assert what == "B and A; 2 seeds each, 4 runs."
    assert on_what == "digits (vision), 2 epochs, 40 steps each; accuracy on the test split, higher is better."
    assert won == "B, 90.00 ± 1.27 %."
    assert how_much.startswith("10.00 percentage points over A, the next.")
    assert how_much.endswith("It has 2.5 times as many FLOPs and 0.5 times as many parameters as A.")
    assert how_sure.startswith("Its 95 % interval overlaps no other (2 seeds, Student's t).")


def test_equal_costs_are_told_as_such():
    rows = [contender("A", 0.7, flops=1e6, params=100_000), contender("B", 0.8, flops=1e6, params=100_010)]
    assert texts(answer(question(), rows))[3].endswith("It has as many FLOPs and about as many parameters as A.")


def test_a_tie_is_a_tie_however_far_apart_the_means():
    # Half widths 12.706 · 0.02 / 2 = 0.127 each, and the means are 0.1 apart. C, at 0.2, is clearly behind.
    found = answer(question(), [contender("A", 0.69, 0.71), contender("B", 0.79, 0.81), contender("C", 0.2, 0.2)])
    *_, won, how_much, how_sure = texts(found)
    assert found.verdict == "tie"
    assert found.headline == "A tie on digits: B and A"
    assert found.leaders == ("B", "A")
    assert won == "No single method. B, 80.00 ± 12.71 %, has the best mean, and A cannot be told from it."
    assert how_much == "10.00 percentage points over A, the next; 60.00 percentage points over C, the last."
    assert how_sure == "The 95 % interval of A overlaps its own; clearly behind: C."


def test_pairs_decide_where_there_are_any():
    rows = [contender("A", 0.69, 0.71), contender("B", 0.79, 0.81), contender("C", 0.78, 0.80)]
    pairs = {"A": {**rows[0], "to_best": {"p_holm": 0.049}}, "C": {**rows[2], "to_best": {"p_holm": 0.05}}}
    found = answer(question(), [pairs["A"], rows[1], pairs["C"]])
    assert (found.verdict, found.leaders) == ("tie", ("B", "C"))
    assert texts(found)[4].startswith("On the same test examples its lead over C may be chance (two-sided, 5 %")
    assert texts(found)[4].endswith("; clearly behind: A.")
    alone = answer(question(), [pairs["A"], rows[1]])
    assert alone.verdict == "win", "although the intervals overlap"
    assert texts(alone)[4].startswith("On the same test examples no lead is likely to be chance")


def test_one_seed_is_no_claim_though_others_lend_their_spread():
    rows = [{**contender("A", 0.1), "interval_95": 0.01}, contender("B", 0.9, 0.9)]
    assert answer(question(), rows).verdict == "no claim"


def test_intervals_that_touch_overlap():
    touching = [{**contender("A", 1.0, 1.0), "interval_95": 0.25}, {**contender("B", 1.5, 1.5), "interval_95": 0.25}]
    assert answer(question("HR@5"), touching).verdict == "tie"
    apart = [touching[0], {**touching[1], "interval_95": 0.2499}]
    assert answer(question("HR@5"), apart).verdict == "win"


def test_equal_means_tie_also_without_any_spread():
    found = answer(question(), [contender("A", 0.5, 0.5), contender("B", 0.5, 0.5)])
    assert found.verdict == "tie"
    assert texts(found)[3] == "Not at all: the mean of B is the same."


def test_one_seed_is_no_claim_however_large_the_difference():
    found = answer(question(), [contender("A", 0.1), contender("B", 0.9)])
    _, _, won, how_much, how_sure = texts(found)
    assert found.verdict == "no claim"
    assert found.leaders == ()
    assert "proves nothing" in found.headline
    assert won == "Not decided. Ahead is B, 90.00 %."
    assert how_much == "80.00 percentage points over A, the next."
    assert how_sure.startswith("No claim: with one seed each, differences may be chance.")


def test_one_contender_with_one_seed_leaves_it_open():
    found = answer(question(), [contender("A", 0.1), contender("B", 0.9, 0.9), contender("C", 0.2, 0.2)])
    assert found.verdict == "no claim"
    assert texts(found)[4].startswith("No claim: there is only one seed of A.")
    assert texts(found)[0].endswith("; 1 to 2 seeds, 5 runs.")


def test_lower_is_better():
    found = answer(question("loss", higher=False), [contender("A", 2.0, 2.0), contender("B", 1.5, 1.5)])
    _, on_what, won, how_much, _ = texts(found)
    assert (found.verdict, found.headline) == ("win", "B wins on digits")
    assert on_what.endswith("loss on the test split, lower is better.")
    assert won == "B, 1.5000 ± 0.0000."
    assert how_much == "0.5000 over A, the next."


def test_a_contender_alone_is_no_comparison():
    found = answer(question(), [contender("A", 0.5, 0.6)])
    assert found.verdict == "one run"
    assert texts(found)[4] == "No claim: a comparison needs two."


@pytest.mark.parametrize(("higher", "floor", "said"), [(True, 0.6, True), (True, 0.4, False), (False, 0.4, True)])
def test_a_floor_that_is_not_beaten_is_said(higher, floor, said):
    rows = [contender("A", 0.5, 0.5), contender("B", 0.5, 0.5)]
    found = answer(question("HR@5", higher), rows, {"popularity": {"HR@5": floor}, "other": {"loss": 9.0}})
    text = f"It does not beat baselines that need no learning: popularity ({floor:.4f})."
    assert texts(found)[2].endswith(text) == said


def test_runs_left_out_are_counted_in_the_first_line():
    found = answer(question(left_out=1), [contender("A", 0.5), contender("B", 0.5)])
    assert texts(found)[0] == "A and B; 1 seed each, 2 runs. 1 run left out, named below."


def test_lists_of_names():
    assert [name_list(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert name_list(list("abcdefgh"), 3) == "a, b, c and 5 more"
