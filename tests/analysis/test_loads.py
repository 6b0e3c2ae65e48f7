import pytest
import torch
from layer_task import LayerTask, OneLayer, force, sample_of

import intbmoe
from intbmoe.analysis.loads import choosing_layers, evaluated_load, training_curves, unit_of
from small_intbmoe import make, tokens


def test_lines_become_curves():
    lines = [
        {"step": 2, "epoch": 0.5, "split": "train", "loss": 3.0, "utilisation": 0.5},
        {"step": 4, "epoch": 1.0, "split": "train", "loss": 2.0, "utilisation": 1.0},
        {"step": 4, "epoch": 1.0, "split": "valid", "loss": 2.5, "accuracy": 0.25},
    ]
    found = training_curves(lines, "accuracy", True)
    by_name = {(curve.split, curve.name): (curve.steps, curve.values) for curve in found.curves}
    assert by_name == {
        ("train", "loss"): ([2, 4], [3.0, 2.0]),
        ("train", "utilisation"): ([2, 4], [0.5, 1.0]),
        ("valid", "loss"): ([4], [2.5]),
        ("valid", "accuracy"): ([4], [0.25]),
    }
    assert found.has_load
    assert list(found.rows()[2]) == ["step", "epoch", "split", "loss", "utilisation", "accuracy"]
    assert found.rows()[2]["utilisation"] is None
    assert not training_curves(lines[2:], "accuracy", True).has_load


def test_load_of_a_forced_router_by_hand():
    mask = torch.ones(7, 4, dtype=torch.bool)
    mask[:, 3] = False
    model = OneLayer(force(make(top_k=2), 1, 3))
    found = evaluated_load(model, sample_of(LayerTask(tokens(7, 4), mask)))
    assert found.unit == "block"
    (load,) = found.layers
    assert load.counts == [0, 21, 0, 21], "seven examples of three valid tokens; the padding is not there"
    assert load.tokens == 21
    assert load.active == 2
    assert load.dead == [0, 2]
    assert (load.utilisation, load.worst_case, load.entropy) == (0.5, 2.0, pytest.approx(0.5))
    assert [row["assignments"] for row in found.rows()] == [0, 21, 0, 21]


def test_no_assignment_is_no_number():
    mask = torch.zeros(2, 4, dtype=torch.bool)
    (load,) = evaluated_load(OneLayer(make()), sample_of(LayerTask(tokens(2, 4), mask))).layers
    assert (load.tokens, load.active, load.entropy) == (0, 0, None)


def test_methods_that_do_not_choose_have_no_load():
    assert choosing_layers(OneLayer(intbmoe.create("soft", 8, 8, experts=2))) == {}
    assert unit_of(OneLayer(intbmoe.create("switch", 8, 8, experts=2))) == "expert"


def test_experts_in_reserve_are_not_dead():
    layer = intbmoe.create("dynmoe", 8, 8, experts=2).double()
    found = evaluated_load(OneLayer(layer.eval()), sample_of(LayerTask(tokens(5, 4))))
    (load,) = found.layers
    opened = layer.open_choices
    if opened is not None:
        assert set(load.present) >= {index for index, is_open in enumerate(opened.tolist()) if is_open}
    assert set(load.dead) <= set(load.present)
