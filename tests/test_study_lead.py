"""The picture of IntBMoE's lead during training: which runs and steps are compared."""

import sys
from pathlib import Path

import pytest

from test_study_picture import summary

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.study import lead


def run(label, seed, curve):
    steps = {"steps": curve[-1][0], "epochs": 0.5, "recipe": {"train": {"warmup": 0.125}}}
    return summary("wikipedia", label, 4.5, seed, 1e8) | {"curve": curve, **steps}


def test_only_steps_and_seeds_that_both_have_count():
    ours = [run("intbmoe", 0, [[20, 5.0], [40, 4.0]]), run("intbmoe", 1, [[20, 5.2], [40, 4.2]])]
    theirs = [run("deepseek", 1, [[20, 5.3], [30, 4.8], [40, 4.5]]), run("deepseek", 2, [[20, 9.0], [40, 9.0]])]
    assert lead.lead(theirs, ours) == [(20, pytest.approx(0.1)), (40, pytest.approx(0.3))]


def test_without_a_common_seed_there_is_no_line():
    assert lead.lead([run("deepseek", 2, [[20, 9.0]])], [run("intbmoe", 0, [[20, 5.0]])]) == []


def test_each_training_has_a_panel_and_each_method_with_runs_a_line():
    short, long = [[20, 5.0], [40, 4.0]], [[20, 5.0], [100, 3.0]]
    found = {
        "wikipedia": {"intbmoe": [run("intbmoe", 0, short)], "deepseek": [run("deepseek", 0, short)]},
        "wikipedia-long": {"intbmoe": [run("intbmoe", 0, long)]},
    }
    picture = lead.draw(found)
    assert [axes.get_title(loc="left") for axes in picture.figure.axes] == [
        "40 steps, 10 of warm-up",
        "100 steps, 25 of warm-up",
    ]
    lines = [[line.get_label() for line in axes.get_lines()[1:]] for axes in picture.figure.axes]
    assert lines == [[found["wikipedia"]["deepseek"][0]["title"]], []]
    assert b"<svg" in picture.content("svg")
