import pytest
import torch
from layer_task import LayerTask, OneLayer, force, sample_of

from intbmoe.analysis.routing import Chosen, choose, count_pairs, routing_shares
from intbmoe.recipes import load_recipe
from intbmoe.tasks import make_task
from intbmoe.tasks.language.looking import TOKEN_KINDS, kind_of, token_texts
from intbmoe.tasks.looking import NO_LABEL, View
from intbmoe.tasks.sequences.task import visits
from intbmoe.tasks.travel.looking import TYPES, token_types
from intbmoe.tasks.vision.looking import class_view
from small_intbmoe import make, tokens


def shares(model, task, **chosen):
    return routing_shares(model, choose(model, sample_of(task), **chosen))


def test_a_router_forced_to_one_block_fills_its_column():
    task = LayerTask(tokens(6, 4), classes=3)
    model = OneLayer(force(make(top_k=1), 2))
    found = shares(model, task)
    (view,) = found.views
    (layer,) = view.layers
    assert (found.unit, view.name, view.labels, layer.choices) == ("block", "class", ["0", "1", "2"], [0, 1, 2, 3])
    assert layer.counts == [[0, 0, 8, 0]] * 3, "two examples of a class, four tokens each"
    assert layer.minus_uniform == [[-0.25, -0.25, 0.75, -0.25]] * 3
    assert len(found.rows()) == 12


def test_with_two_choices_each_counts():
    task = LayerTask(tokens(6, 4), classes=3)
    found = shares(OneLayer(force(make(top_k=2), 2, 0)), task)
    assert found.views[0].layers[0].minus_uniform == [[0.25, -0.25, 0.25, -0.25]] * 3


def test_a_label_without_tokens_has_no_share():
    task = LayerTask(tokens(2, 4), classes=3)
    found = shares(OneLayer(make()), task)
    assert found.views[0].layers[0].minus_uniform[2] is None
    assert {row["label"] for row in found.rows()} == {"0", "1"}


def test_padding_is_never_counted():
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    task = LayerTask(tokens(6, 4), mask)
    every = View("every", ("token",), lambda batch: torch.zeros_like(batch["mask"], dtype=torch.int64))
    padding = View("padding", ("token",), lambda batch: torch.where(batch["mask"], NO_LABEL, 0))
    found = routing_shares(OneLayer(make(top_k=2)), Chosen([every, padding], ["moe"], sample_of(task)))
    assert sum(found.views[0].layers[0].counts[0]) == 2 * int(mask.sum())
    assert found.views[1].layers[0].minus_uniform == [None]


def test_chosen_classes_are_counted_on_all_their_examples_in_the_order_given():
    task = LayerTask(tokens(30, 4), classes=10)
    model = OneLayer(make(top_k=1))
    whole, some = shares(model, task), shares(model, task, classes=["class 7", "2"])
    (view,) = some.views
    assert (view.labels, view.chosen, whole.views[0].chosen) == (["7", "2"], True, False)
    assert some.examples == 6, "of thirty, those of the two classes"
    assert view.layers[0].counts == [whole.views[0].layers[0].counts[label] for label in (7, 2)]
    few = routing_shares(model, choose(model, sample_of(task, examples=4), classes=["7", "2"]))
    assert few.examples == 4, "the limit holds"


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleDict({"4": OneLayer(make()), "6": OneLayer(make()), "head": OneLayer(make())})

    def forward(self, batch):
        return sum(block(batch) for block in self.blocks.values())


def test_chosen_layers_come_in_the_order_given():
    model, task = TwoLayers(), LayerTask(tokens(6, 4), classes=3)
    found = shares(model, task, layers=["6", "blocks.4.moe"]).views[0].layers
    assert [layer.layer for layer in found] == ["blocks.6.moe", "blocks.4.moe"]
    assert len(shares(model, task).views[0].layers) == 3
    with pytest.raises(
        ValueError, match=r"no layer is called '5': the layers whose tokens choose are 4 \(blocks\.4\.moe"
    ):
        choose(model, sample_of(task), layers=["4", "5"])


def test_classes_that_cannot_be_chosen_are_told():
    model, task = OneLayer(make()), LayerTask(tokens(6, 4), classes=3)
    with pytest.raises(ValueError, match=r"no class is called 'clas 2': did you mean 'class 2'\?"):
        choose(model, sample_of(task), classes=["clas 2"])
    task.views = lambda: [View("kind", ("a",), None), View("position", ("b",), None)]
    with pytest.raises(ValueError, match="the task 'layer' has none; its tokens are grouped by kind, position"):
        choose(model, sample_of(task), classes=["1"])
    with pytest.raises(ValueError, match="the tokens of this model do not choose experts"):
        choose(torch.nn.Identity(), sample_of(task), layers=["1"])


def test_words_for_classes():
    view = class_view(("hen", "crane bird", "crane", "9"), ("n01514859", "n02012849", "n03126707", "n00000009"))
    assert view.labels[0] == "hen (n01514859)"
    assert view.places_of(["Hen", "n02012849", "crane (n03126707)", "3", "9", "hen"]) == [0, 1, 2, 3], "each once"
    assert class_view(("3", "crane (1)", "ox"), ("0", "1", "2")).labels == ("3 (0)", "crane (1)", "ox (2)")
    assert class_view(("3", "4"), ("0", "1")).places_of(["4"]) == [1], "a name goes before a number"
    with pytest.raises(ValueError, match="no class is called '4'"):
        view.places_of(["4"])
    with pytest.raises(ValueError, match="2 labels of class are called 'ox': give a number, 0, 2"):
        class_view(("ox", "cow", "ox"), ("0", "1", "2")).places_of(["ox"])
    many = class_view([f"animal {n}" for n in range(1000)], [str(n) for n in range(1000)])
    with pytest.raises(ValueError, match=r"there are 1000, such as animal 0, .* 0 to 999 work too"):
        many.places_of(["xyz"])


def test_pairs_by_hand():
    ids = torch.tensor([[0, 1], [1, -1], [2, 0], [-1, -1]])
    labels = torch.tensor([1, 0, NO_LABEL, 1])
    assert count_pairs(labels, ids, (2, 3)).tolist() == [[0, 1, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a", "letters"),
        (" the", "letters"),
        ("é", "letters"),
        ("7", "digits"),
        (" 2024", "digits"),
        (".", "punctuation"),
        ("'", "punctuation"),
        ("(", "code symbols"),
        (" ==", "code symbols"),
        ("_", "code symbols"),
        (" ", "white space"),
        ("\n\n", "white space"),
        ("a1", "other"),
        ("", "other"),
        ("\ufffd", "other"),
    ],
)
def test_kinds_of_tokens(text, kind):
    assert kind_of(text) == kind


def test_bytes_have_the_kind_of_their_character():
    task = make_task(load_recipe("stdlib"))
    kind, position = task.views()
    assert len(token_texts(None)) == task.recipe.model.vocabulary
    ids = torch.tensor([[ord("x"), ord("3"), ord(":"), ord("["), ord(" "), 200, 256]])
    names = [TOKEN_KINDS[label] for label in kind.find({"ids": ids})[0]]
    assert names == ["letters", "digits", "punctuation", "code symbols", "white space", "other", "other"]
    assert position.labels[0] == "0–15"
    assert position.labels[-1] == "112–127"
    found = position.find({"ids": torch.zeros(2, 128, dtype=torch.int64)})
    assert found[1].tolist() == [place // 16 for place in range(128)]


def test_ids_of_a_prepared_folder_are_read_with_its_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    from intbmoe.tasks.language.tokenizer import train_bpe

    (tmp_path / "tokenizer.json").write_text(train_bpe(["the cat = 12 ", "the cat"] * 20, 300), encoding="utf-8")
    texts = token_texts(tmp_path)
    assert kind_of(texts[0]) == "other", "the end of a text does not belong to it"
    kinds = {text: kind_of(text) for text in texts}
    assert (kinds[" cat"], kinds["="], kinds["1"], kinds[" "]) == ("letters", "code symbols", "digits", "white space")


def travel_batch():
    """Two users; the first has two sessions, the second has one, whose hour is unknown."""
    scenario = torch.zeros(2, 2, 6, dtype=torch.int32)
    place = torch.zeros(2, 2, 5, dtype=torch.int32)
    scenario[0, :, 3] = torch.tensor([1, 24])
    place[0, :, 2] = torch.tensor([3, 1])
    scenario[1, 1, 3] = 5  # padding may hold anything
    place[1, 1, 2] = 5
    return {"mask": torch.tensor([[True, True], [True, False]]), "scenario": scenario, "place": place}


def test_travel_tokens_by_hand():
    types = [[TYPES[label] if label >= 0 else None for label in row] for row in token_types(travel_batch())]
    session = ["scenario", "intention", "feedback"]
    assert types == [["profile"] * 6 + session * 2, ["profile"] * 6 + session + [None] * 3]


def test_travel_hours_and_categories_by_hand():
    _, hour, category = make_task(load_recipe("journeys")).views()
    assert hour.labels[0] == "00"
    assert len(category.labels) == 12
    nothing = [NO_LABEL] * 12
    assert hour.find(travel_batch()).tolist() == [[-1] * 6 + [0, -1, -1, 23, -1, -1], nothing]
    assert category.find(travel_batch()).tolist() == [[-1] * 7 + [2, -1, -1, 0, -1], nothing]


def test_items_seen_before_by_hand():
    items = torch.tensor([[4, 5, 4, 4, -1, -1], [1, 2, 3, 1, 2, 9]])
    assert visits({"items": items}).tolist() == [[0, 0, 1, 1, -1, -1], [0, 0, 0, 1, 1, 0]]
    position = make_task(load_recipe("beauty")).views()[1]
    assert position.labels[0] == "0–6"
    assert position.labels[-1] == "49–49"
    assert position.find({"items": items}).tolist() == [[0, 0, 0, 0, -1, -1], [0] * 6]
