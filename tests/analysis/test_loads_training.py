import math

import numpy as np
import pytest

from intbmoe.analysis.drawing import draw_load_training
from intbmoe.analysis.drawing.load import relative_loads
from intbmoe.analysis.loads import load_history

LINES = [
    {"step": 20, "layers": {"blocks.0.moe": {"tokens": 10, "counts": [10, 0, None], "untaken": 0.0}}},
    {"step": 40, "layers": {"blocks.0.moe": {"tokens": 10, "counts": [5, 5, 10], "dropped": 0.2, "untaken": 0.1}}},
    {"step": 45, "layers": {"blocks.0.moe": {"tokens": 0, "counts": [0, 0, 0], "untaken": 0.0}}},
]


def test_every_window_by_hand():
    (found,) = load_history(LINES, "expert").layers
    assert found.steps == [20, 40, 45]
    assert found.utilisation == [0.5, 1, None]
    assert found.worst_case == [2, 1.5, None]
    even = math.log(2) + math.log(4) / 2 - math.log(2) / 2  # −Σ p log p of ¼, ¼, ½
    assert found.entropy == [0, pytest.approx(even / math.log(3)), None]
    assert found.dead == [1, 0, 3], "an expert that is not there is not dead"
    assert found.active == [1, 2, 0]
    assert found.dropped == [0, 0.2, 0]
    assert found.untaken == [0, 0.1, 0]


def test_rows_leave_out_who_was_not_there():
    rows = load_history(LINES, "expert").rows()
    assert len(rows) == 8
    assert rows[0] == {"step": 20, "layer": "blocks.0.moe", "expert": 0, "assignments": 10, "tokens": 10}


def test_what_is_not_counted_is_not_zero():
    lines = [{"step": 1, "layers": {"moe": {"tokens": 4, "counts": [2, 2]}}}]
    (found,) = load_history(lines, "block").layers
    assert (found.dropped, found.untaken) == ([0], None)


def test_loads_over_their_mean():
    values = relative_loads([window["layers"]["blocks.0.moe"]["counts"] for window in LINES])
    expected = [[2, 0.75, 0], [0, 0.75, 0], [math.nan, 1.5, 0]]
    np.testing.assert_allclose(values, expected)


@pytest.mark.parametrize("lines", [LINES, LINES[:1]], ids=["three windows", "one window"])
def test_pictures_of_any_number_of_windows(lines):
    from dataclasses import asdict

    experts, layers = draw_load_training(asdict(load_history(lines, "expert")))
    assert (experts.name, layers.name) == ("load-experts", "load-layers")
    assert "Grey" in experts.see
    titles = [axes.get_title("left") for axes in layers.figure.axes if axes.get_visible()]
    assert ("share of assignments dropped" in titles) == (len(lines) > 1)
    assert experts.content("png").startswith(b"\x89PNG")


def test_a_layer_of_many_is_named():
    lines = [
        {"step": 1, "layers": {f"layers.{n}.moe": {"tokens": 2, "counts": [2, n]} for n in range(20)}},
        {"step": 2, "layers": {f"layers.{n}.moe": {"tokens": 2, "counts": [2, n]} for n in range(20)}},
    ]
    from dataclasses import asdict

    _, layers = draw_load_training(asdict(load_history(lines, "expert")))
    assert "Shown are 8 of 20 layers" in layers.see
    assert "Experts without a token at the end: most in layer 0, 1" in layers.see
