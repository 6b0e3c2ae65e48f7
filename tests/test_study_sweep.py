"""The pictures of the study's sweeps: which points they have, and what they are measured against."""

import sys
from pathlib import Path

import pytest

from test_study_picture import summary

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.study import sweep

TITLES = {"blocks4": "K = 4", "blocks16": "K = 16", "top_k1": "k = 1", "experts2": "E = 2", "layers1": "L = 1"}


def run(label, title, loss, seed=0, flops=1e8):
    moe = {"experts": 8, "options": {"blocks": 8, "top_k": 2}}
    changes = {"title": title, "recipe": {"moe": moe}, "file": "none.json"}
    return summary("wikipedia", label, loss, seed, flops, **changes)


@pytest.fixture
def rows():
    return {"intbmoe": [run("intbmoe", "IntBMoE", loss, seed) for seed, loss in enumerate((4.50, 4.52, 4.54))]}


@pytest.fixture
def swept():
    runs = enumerate(TITLES.items())
    return {name: [run(name, f"IntBMoE, {title}", 4.4 + place / 10, flops=2e8)] for place, (name, title) in runs}


def test_each_panel_has_its_values_in_order_and_the_default(rows, swept):
    panels = sweep.gather(rows, swept)
    values = {name: [point.value for point in points] for name, points in panels.items()}
    assert values == {"K": [4, 8, 16], "k": [1, 2], "E": [2, 8], "L": [1, 2]}


def test_a_lower_loss_than_the_defaults_with_the_same_seed_is_better(rows, swept):
    fewer, default, more = sweep.gather(rows, swept)["K"]
    assert fewer.better == pytest.approx(4.50 - 4.4)
    assert more.better == pytest.approx(4.50 - 4.5)
    assert fewer.flops == 2
    assert default == (8, 0, 0, 1)
    assert fewer.interval > 0.02  # one run against one, by the spread of the default's seeds


def test_a_picture_is_drawn_where_there_are_runs(rows, swept):
    picture = sweep.draw("wikipedia", sweep.gather(rows, swept), swept)
    assert [axes.get_title(loc="left")[0] for axes in picture.figure.axes] == ["K", "k", "E", "L"]
    assert b"<svg" in picture.content("svg")
