import pytest
import torch
from layer_task import LayerTask, OneLayer, force, sample_of

import intbmoe
from intbmoe.analysis.drawing import draw_load
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
    assert list(found.rows()[2]) == ["step", "epoch", "split", "loss", "utilisation", "accuracy"]
    assert found.rows()[2]["utilisation"] is None


def test_load_of_a_forced_router_by_hand():
    mask = torch.ones(7, 4, dtype=torch.bool)
    mask[:, 3] = False
    model = OneLayer(force(make(top_k=2), 1, 3))
    found = evaluated_load(model, sample_of(LayerTask(tokens(7, 4), mask)))
    assert found.unit == "block"
    (load,) = found.layers
    assert load.counts == [0, 21, 0, 21], "seven examples of three valid tokens, without the padding"
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


def test_a_capacity_that_drops_a_known_number():
    layer = intbmoe.create("switch", 8, 12, experts=2, eval_capacity_factor=1.0).double().eval()
    with torch.no_grad():
        layer.router.weight.zero_()  # all tie, so all go to the first
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[:, 10:] = False
    (load,) = evaluated_load(OneLayer(layer), sample_of(LayerTask(tokens(3, 12), mask), batch_size=2)).layers
    assert load.counts == [15, 0], "five of ten valid tokens in each of three examples"
    assert (load.dropped, load.untaken) == (0.5, 0.5)
    assert load.tokens_by_choices == [15, 15]
    assert load.active == 0.5


def test_v_moe_drops_choices_before_it_drops_tokens():
    options = {"experts": 2, "top_k": 2, "eval_capacity_factor": 0.5, "capacity_multiple": 1}
    layer = intbmoe.create("vmoe", 8, 12, **options).double().eval()
    with torch.no_grad():
        layer.router.weight.zero_()
    (load,) = evaluated_load(OneLayer(layer), sample_of(LayerTask(tokens(2, 8)))).layers
    # Every token wants both experts, which have four places each: the first four tokens get both.
    assert load.counts == [8, 8]
    assert (load.dropped, load.untaken) == (0.5, 0.5)
    assert load.tokens_by_choices == [8, 0, 8]


def test_tokens_that_no_expert_took():
    layer = intbmoe.create("expert_choice", 8, 12, experts=2, capacity_factor=1.0).double().eval()
    with torch.no_grad():
        layer.router.weight.zero_()  # equal scores go to the earlier token: both experts take the same two of four
    (load,) = evaluated_load(OneLayer(layer), sample_of(LayerTask(tokens(3, 4)))).layers
    assert load.tokens_by_choices == [6, 0, 6]
    assert (load.dropped, load.untaken, load.active) == (None, 0.5, 1.0), "no token wanted them, so nothing was dropped"


def test_what_is_left_out_is_said_and_drawn():
    from dataclasses import asdict

    from intbmoe.analysis.drawing import draw_load

    layer = intbmoe.create("switch", 8, 12, experts=2, eval_capacity_factor=1.0).double().eval()
    with torch.no_grad():
        layer.router.weight.zero_()
    found = asdict(evaluated_load(OneLayer(layer), sample_of(LayerTask(tokens(3, 10)))))
    load, choices = draw_load(found)
    assert "Dropped assignments by layer, first to last: 50 %." in load.see
    assert "Tokens without any expert: 50 %." in load.see
    assert [bar.get_height() for bar in choices.figure.axes[0].patches] == [50, 50]
    kept = asdict(evaluated_load(OneLayer(make(top_k=2)), sample_of(LayerTask(tokens(3, 10)))))
    assert [picture.name for picture in draw_load(kept)] == ["load"], "all tokens have two blocks"


@pytest.mark.parametrize(("dead", "told"), [([2], "1 block got no token (an orange cross)."), ([1, 2], "2 blocks got")])
def test_blocks_without_a_token_are_counted_in_words(dead, told):
    counts = [0 if block in dead else 6 for block in range(3)]
    layer = {"layer": "moe", "counts": counts, "present": [0, 1, 2], "dead": dead, "active": 1.0, "worst_case": 2.0}
    layer |= {"tokens": 6, "tokens_by_choices": [0, 6], "dropped": None, "untaken": 0.0}
    picture = draw_load({"unit": "block", "split": "valid", "examples": 6, "layers": [layer]})[0]
    assert told in picture.see
