"""Participation, execution and materialization: of layers, of models on inputs, in the cost table and as a picture."""

import pytest
import torch
from torch import nn

import intbmoe
from intbmoe.analysis.cost import measure
from intbmoe.analysis.cost_report import cost_table
from intbmoe.analysis.drawing.quantities import draw_quantities
from intbmoe.analysis.quantities import BATCH, TOKENS, quantities_of
from intbmoe.analysis.settings import IMAGENET
from intbmoe.counting import Shares, shares_of
from intbmoe.layer import OnePer
from intbmoe.registry import find_method, list_methods

GROWING = {
    "smear": (5, 5),
    **dict.fromkeys(("smear_token", "dsfnet", "hypermoe"), (5 * 33, 5 * 70)),
    "lory": (5 * 3, 5 * 5),
}
"""Weight sets for five sequences of 33 and of 70 tokens; Lory's segments have 16 tokens."""


@pytest.mark.parametrize("name", list_methods())
def test_materialization_is_what_a_method_builds_for_an_input(name):
    quantities = intbmoe.create(name, 8, 12).quantities()
    fixed = 8 if name in ("intbmoe", "mobe") else 0
    assert (quantities.sets(5, 33), quantities.sets(5, 70)) == GROWING.get(name, (fixed, fixed))


def test_it_reads_as_it_is_said():
    assert [str(OnePer(unit)) for unit in ("example", "segment", "token")] == [
        "1 per example", "1 per segment", "1 per token",
    ]  # fmt: skip
    assert intbmoe.create("lory", 8, 12, segment=5).quantities().sets(2, 11) == 6


@pytest.mark.parametrize(("name", "expected"), [("smear", 3), ("smear_token", 60), ("lory", 6), ("intbmoe", 8)])
def test_shares_are_counted_on_the_tokens_that_layers_see(name, expected):
    """Three sequences of 40 tokens, of which the layers see half."""

    class Halving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(intbmoe.create(name, 8, 12) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x[:, :20])
            return x

    model = Halving()
    shares = shares_of(model, (torch.randn(3, 40, 8),))
    assert shares.materialization == expected
    unit = {"smear": "example", "smear_token": "token", "lory": "segment"}.get(name)
    assert shares.materialization_per == unit
    assert shares.materialization_text() == ("8" if unit is None else f"1 per {unit}")
    assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_the_cost_table_has_them():
    rows = [measure(IMAGENET, name) for name in ("dense", "dynmoe", "lory", "intbmoe")]
    assert [row.shares for row in rows] == [
        Shares(1, 1, 0, None),
        Shares(6.37, 6.37, 0, None),
        Shares(17, 1, 13, "segment"),  # 196 tokens of one image
        Shares(16, 2, 8, None),
    ]
    table = cost_table(IMAGENET, rows, attention=False).select("Participation", "Execution", "Materialization")
    texts = [[cell.text for cell in row] for row in table.rows]
    assert texts == [["1", "1", "0"], ["~6.37", "~6.37", "0"], ["17", "1", "1 per segment"], ["16", "2", "8"]]
    assert rows[2].as_dict()["materialization"] == 13
    assert rows[2].as_dict()["materialization_per"] == "segment"


def test_the_picture_has_every_method_and_every_number():
    rows = [quantities_of(find_method(name)) for name in list_methods()]
    token = next(row for row in rows if row.name == "smear_token")
    assert (token.sets_of_one, token.sets_of_batch) == (TOKENS, BATCH * TOKENS) == (196, 64 * 196)
    figure = draw_quantities(rows).figure
    participation, execution, sets = figure.axes
    labels = [label.get_text() for label in participation.get_yticklabels()]
    names = [label.replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ").split(", ") for label in labels]
    places = {name: place for group, place in zip(names, participation.get_yticks(), strict=True) for name in group}
    assert sorted(places) == sorted(row.title for row in rows)
    assert max(places, key=places.get) == "IntBMoE"
    for axes in figure.axes:
        assert axes.get_xscale() == "log"
    by_place = {axes: {text.xy[1]: text.get_text() for text in axes.texts if text.get_text()} for axes in figure.axes}
    for row in rows:
        place, about = places[row.title], "~" if row.name in ("remoe", "dynmoe", "mass", "lapsum") else ""
        assert by_place[participation][place] == f"{about}{row.participation:.2g}"
        assert by_place[execution][place] == f"{about}{row.execution:.2g}"
        assert by_place[sets][place] == str(row.materialization).removeprefix("1 ")
