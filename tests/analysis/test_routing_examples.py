"""Single examples: a router forced to one block paints everything in its colour, and nothing else."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from layer_task import LayerTask, OneLayer, force, sample_of
from matplotlib.collections import PatchCollection

from intbmoe.analysis.drawing import draw_examples
from intbmoe.analysis.drawing.examples import LINE, PALE, lay_out, visible, visit_places
from intbmoe.analysis.routing import example_routing
from intbmoe.analysis.sample import Sample
from intbmoe.layer import moe_layers
from intbmoe.recipes import load_recipe
from intbmoe.report.canvas import block_colours, shade
from intbmoe.tasks import make_task
from intbmoe.tasks.looking import Content, Shown, Token
from intbmoe.tasks.travel.looking import show_journeys
from intbmoe.tasks.vision.looking import one_per_class
from intbmoe.train.distribution import Ranks
from small_intbmoe import make, tokens

DATA = {"stdlib": {"max_bytes": 60_000}, "journeys": {"users": 60}}


def task_of(name):
    recipe = load_recipe(name)
    recipe = replace(recipe, data=replace(recipe.data, **DATA.get(name, {})))
    return make_task(replace(recipe, model=replace(recipe.model, dim=24, hidden=24)))


def found_of(name, *blocks):
    """Examples of an embedded recipe whose every layer sends all tokens to ``blocks``."""
    task = task_of(name)
    model = task.make_model().eval()
    for _, layer in moe_layers(model):
        force(layer, *blocks)
    sample = Sample(task, "valid", 24, Ranks())
    return example_routing(model, sample, task.shown(sample.source))


def painted(figure):
    """The face colours of all cells, axes by axes, large areas before strips."""
    collections = ([c for c in axes.collections if isinstance(c, PatchCollection)] for axes in figure.axes)
    return [[c.get_facecolor()[:, :3] for c in of] for of in collections]


def test_a_router_forced_to_one_block_paints_every_patch_its_colour():
    found = found_of("digits", 5, 2)
    assert (found.unit, found.form, found.choices) == ("block", "image", 8)
    assert [shown.title for shown in found.examples] == ["0", "1", "3", "5", "6", "8"]
    for shown in found.examples:
        assert shown.texts == ["row 0, column 0", "row 0, column 1", "row 1, column 0", "row 1, column 1"]
        assert [layer.ids for layer in shown.layers] == [[[5, 2]] * 4] * 2
        assert all(weights[0] > weights[1] for layer in shown.layers for weights in layer.weights)
    (picture,) = draw_examples(asdict(found))
    colours = block_colours(8)
    images = [of for of in painted(picture.figure) if not of]
    tinted = [of for of in painted(picture.figure) if of]
    assert (len(images), len(tinted)) == (6, 12), "an image, and below it one for each of the two layers"
    for first, second in tinted:
        np.testing.assert_allclose(first, [colours[5]] * 4)
        np.testing.assert_allclose(second, [colours[2]] * 4)
    assert "layer 0: 1, layer 2: 1" in picture.see


def test_many_patches_are_pixels_whose_legend_has_their_colours_on_dark_screens_too():
    found = asdict(found_of("digits", 5, 2))
    for shown in found["examples"]:
        shown["kinds"] = ["patch"] * 16
        for layer in shown["layers"]:
            layer["ids"] = [[5, 2]] * 16
    (few,), (many,) = draw_examples(asdict(found_of("digits", 5, 2))), draw_examples(found)
    assert few.content("svg").count(b'id="keeps-colour') == 0
    assert many.content("svg").count(b'id="keeps-colour') == 2
    tinted = [collection for axes in many.figure.axes for collection in axes.collections]
    assert tinted
    assert all(collection.get_rasterized() for collection in tinted)


@pytest.mark.parametrize("name", ["stdlib", "journeys"])
def test_texts_and_journeys_are_painted_alike(name):
    found = found_of(name, 3, 6)
    pictures = draw_examples(asdict(found))
    assert [picture.name for picture in pictures] == ["example-1", "example-2", "example-3"]
    for picture, shown in zip(pictures, found.examples, strict=True):
        for first, second in painted(picture.figure):
            assert len(first) >= len(shown.texts)
            np.testing.assert_allclose(first, np.tile(shade(block_colours(8)[3], PALE), (len(first), 1)))
            np.testing.assert_allclose(second, np.tile(block_colours(8)[6], (len(second), 1)))


def test_the_text_is_the_split_s_own():
    found = found_of("stdlib", 0)
    source = task_of("stdlib").split("valid")
    for shown in found.examples:
        ids = source.batch([shown.index], 0, 0)["ids"][0].tolist()
        assert "".join(shown.texts) == "".join(chr(i) if i < 128 else "" for i in ids)


def test_csv_has_a_row_for_each_choice():
    rows = found_of("digits", 5, 2).rows()
    assert len(rows) == 6 * 4 * 2 * 2
    assert rows[1].items() >= {"token": 0, "kind": "patch", "layer": "blocks.0.moe", "rank": 1, "block": 2}.items()


def shown_of(valid):
    """Every token of a layer task except padding."""

    def describe(batch, row, index):
        return Content("x", [Token("token", "a") if here else None for here in valid[index].tolist()])

    return Shown("text", list(range(len(valid))), describe)


def test_padding_is_not_shown_and_a_dropped_token_is_hatched():
    from intbmoe import create

    layer = create("switch", 8, 12, experts=2, eval_capacity_factor=1.0).double().eval()
    with torch.no_grad():
        layer.router.weight.zero_()  # all tie, so all go to the first
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 10:] = False
    found = example_routing(OneLayer(layer), sample_of(LayerTask(tokens(2, 12), mask)), shown_of(mask))
    first, second = (shown.layers[0].ids for shown in found.examples)
    assert first == [[0]] * 6 + [[]] * 6, "⌊12/2⌋ places for twelve tokens"
    assert second == [[0]] * 5 + [[]] * 5, "ten are valid"
    pictures = draw_examples(asdict(found))
    assert "no expert computed it (6 times)" in pictures[0].see
    hatched = [patch for patch in pictures[1].figure.axes[0].patches if patch.get_hatch()]
    assert len(hatched) == 5


def test_the_heaviest_comes_first_whatever_the_method_s_order():
    task = LayerTask(tokens(3, 4))
    valid = torch.ones(3, 4, dtype=torch.bool)
    found = example_routing(OneLayer(make(top_k=3)), sample_of(task), shown_of(valid))
    for shown in found.examples:
        for weights in shown.layers[0].weights:
            assert weights == sorted(weights, reverse=True)
            assert len(weights) == 3


def test_one_image_per_class():
    assert one_per_class(np.array([4, 0, 0, 1, 1, 3, 2, 4])) == [1, 3, 6, 5, 0]


def test_journeys_by_hand():
    scenario = torch.zeros(1, 2, 6, dtype=torch.int32)
    place = torch.zeros(1, 2, 5, dtype=torch.int32)
    scenario[0, 0, 3], scenario[0, 0, 4] = 9, 1
    place[0, 0, 2] = 5
    batch = {"mask": torch.tensor([[True, False]]), "scenario": scenario, "place": place}
    content = show_journeys([], task_of("journeys").category_names()).describe(batch, 0, 7)
    said = [None if token is None else f"{token.kind} {token.text}" for token in content.tokens]
    assert said[:6] == [f"profile {number}" for number in range(1, 7)]
    assert said[6:] == ["scenario Mon 08", "intention restaurant", "feedback ", None, None, None]


def test_visits_stand_in_rows():
    kinds = ["profile"] * 6 + ["scenario", "intention", "feedback"]
    where, labels, columns = visit_places(kinds, ["", "", "", "", "", "", "Mon 08", "bar", ""])
    assert where == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    assert (labels, columns) == (["profile", "profile", "Mon 08 bar"], ["scenario", "intention", "feedback"])
    assert visit_places(["item", "item"], ["7", "9"]) == ([(0, 0), (0, 1)], ["7", "9"], [""])


def test_lines_break_where_the_text_does_and_where_the_page_ends():
    places, lines = lay_out(["ab", "\n", "x" * (LINE + 1), ""])
    assert places[:2] == [[(0, 0, "ab")], [(2, 0, "↵")]]
    assert places[2] == [(0, 1, "x" * LINE), (0, 2, "x")]
    assert places[3] == [(1, 2, "·")], "a token without text of its own"
    assert lines == 3


def test_letters_the_font_lacks_are_boxes():
    assert visible("a\t漢\x07$é") == "a→□□$é"


@pytest.mark.parametrize("number", [1, 8, 9, 24, 25, 64])
def test_every_block_has_a_colour_of_its_own(number):
    colours = block_colours(number)
    assert len({tuple(np.round(colour, 6)) for colour in colours}) == number
