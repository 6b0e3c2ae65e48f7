"""The sequences task: splits of a file, loss and metrics, learning, recipes and their sets."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_items import check_ins, item_lists, write
from torch import nn

import intbmoe
from intbmoe.budget import TABLE_2
from intbmoe.layer import moe_layers
from intbmoe.models.sequence import PADDING, SequenceConfig
from intbmoe.recipes import load_recipe, recipe_from_dict, recipe_to_dict
from intbmoe.recipes.sets import find_variants
from intbmoe.tasks import DataError, make_task
from intbmoe.tasks.recipe import MoESettings, TrainSettings
from intbmoe.tasks.sequences.task import SequenceData, SequencesRecipe
from intbmoe.train import train

RECIPES = ("foursquare", "foursquare-us", "yelp", "beauty")
HISTORIES = ([0, 1, 2, 0, 1, 2], [3, 3, 3, 4], [2, 1])
SMALL = SequenceConfig(items=5, length=4, dim=8, depth=1, hidden=16)


def recipe(path=None, moe=None, model=SMALL, source="check-ins", **settings):
    data = SequenceData(source=source, path=path)
    return SequencesRecipe("test", "sequences", data, model, moe or MoESettings("switch", 2), **settings)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "some.npz", check_ins(*HISTORIES))


class Says(nn.Module):
    """A fake model with a prepared answer."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, items, targets=None):
        return self.answer


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        (([0, 1], [4]), "some.npz leaves nothing to evaluate: expected users with 3 events or more"),
        (([0, 1, 4], [2]), "some.npz leaves nothing to train on: expected users with 4 events or more"),
    ],
)
def test_histories_that_are_all_too_short_are_refused_with_the_file(tmp_path, histories, message):
    task = make_task(recipe(write(tmp_path / "some.npz", check_ins(*histories))))
    for split in ("train", "valid", "test"):
        with pytest.raises(DataError, match=message):
            task.split(split)


@pytest.mark.parametrize(("source", "make"), [("check-ins", check_ins), ("item-lists", item_lists)])
def test_both_sources_give_the_same_splits(tmp_path, source, make):
    task = make_task(recipe(write(tmp_path / "some.npz", make(*HISTORIES)), source=source))
    assert [len(task.split(name)) for name in ("train", "valid", "test")] == [3, 2, 2]
    batch = task.split("test").batch([0, 1], 0, 0)
    assert batch["items"].tolist() == [[1, 2, 0, 1], [3, 3, 3, PADDING]]
    assert batch["target"].tolist() == [2, 4]
    assert batch["new"].tolist() == [False, True]


def test_data_is_read_when_a_split_is_asked_for():
    task = make_task(load_recipe("foursquare"))
    assert task.make_model()(*task.example_inputs()).shape == (1, 4988)
    with pytest.raises(DataError, match=r"set data.path"):
        task.split("train")


def test_loss_is_a_sum_over_the_targets(file):
    task = make_task(recipe(file))
    targets = torch.tensor([[1, 2], [3, PADDING]])
    total, count = task.loss(Says(torch.tensor([[-1.0, -2.5], [-0.5, 0.0]])), {"items": None, "targets": targets})
    assert (total.item(), count.item()) == (4.0, 3)
    model = task.make_model()
    batch = task.split("train").batch(range(3), 0, 0)
    total, count = task.loss(model, batch)
    assert count.item() == (batch["targets"] != PADDING).sum() == 3 + 1 + 1
    assert total.item() / 5 == pytest.approx(math.log(5), rel=0.2)  # an untrained model knows nothing


def test_metrics_by_hand_add_up_over_batches(file):
    task = make_task(recipe(file))
    scores = torch.zeros(4, 12).log_softmax(1).clone()
    scores[0, 3] = 0.0  # first
    scores[1, :4] = 0.0  # 3 shares the first place with three others: fourth
    scores[3, :11] = 0.0  # 11 is behind eleven
    target, new = torch.tensor([3, 3, 5, 11]), torch.tensor([False, True, False, True])
    batch = {"items": torch.zeros(4, 2, dtype=torch.int64), "target": target, "new": new}
    whole = task.evaluate(Says(scores), batch)
    sums = dict.fromkeys(whole, 0.0)
    for index in range(4):
        part = {name: value[index : index + 1] for name, value in batch.items()}
        for name, value in task.evaluate(Says(scores[index : index + 1]), part).items():
            sums[name] += float(value)
    assert sums == pytest.approx({name: float(value) for name, value in whole.items()})
    metrics = task.metrics(sums)
    assert metrics["HR@1"] == 0.25
    assert metrics["HR@5"] == metrics["HR@10"] == 0.5  # all twelve are tied in the third row: last
    assert metrics["HR@5 new"] == 0.5
    assert metrics["HR@1 new"] == 0
    assert metrics["share new"] == 0.5
    assert metrics["NDCG@10"] == pytest.approx((1 + 1 / math.log2(5)) / 4)
    assert metrics["loss"] == pytest.approx(math.log(12) * 2 / 4)


def test_padding_is_cut_off_before_the_model_and_changes_nothing(tmp_path):
    histories = [list(range(20)), [3, 1, 2, 5], [19, 7, 7]]
    model = replace(SMALL, items=20, length=40)
    task = make_task(recipe(write(tmp_path / "some.npz", check_ins(*histories)), model=model))
    network = task.make_model().double().eval()
    batch = task.split("test").batch(range(3), 0, 0)
    cut = task.prepare(batch, None)
    assert (batch["items"].shape, cut["items"].shape) == ((3, 40), (3, 32))
    with torch.no_grad():
        assert torch.allclose(network(cut["items"]), network(batch["items"]), atol=1e-12, rtol=0)
    short = task.split("train").batch([1], 0, 0)
    cut = task.prepare(short, torch.Generator())
    assert cut["items"].shape == cut["targets"].shape == (1, 16)
    assert [float(x) for x in task.loss(network, cut)] == pytest.approx([float(x) for x in task.loss(network, short)])


def test_floors_are_those_of_the_files_test_split(file):
    floors = make_task(recipe(file)).floors()
    assert list(floors) == ["popularity", "visit counter", "visit counter, popularity"]
    own = make_task(recipe(file)).metrics(dict.fromkeys(("count", "count new", "loss", *_sum_names()), 1.0))
    assert all(set(metrics) == set(own) - {"loss"} for metrics in floors.values())
    # 2 is one of three items that its user visited equally often, and fourth of all; 4 is new and never seen before.
    assert floors["popularity"]["HR@5"] == 1.0
    assert floors["visit counter"]["share new"] == 0.5


def _sum_names():
    return [f"{name}{part}" for part in ("", " new") for name in ("HR@1", "HR@5", "HR@10", "NDCG@10")]


def walks(users=24, length=14, items=10):
    """Histories on a circle: the next item is certain, but visit counts do not show it."""
    return [[(user * 3 + step) % items for step in range(length)] for user in range(users)]


@pytest.mark.parametrize(("method", "copy"), [("dense", False), ("intbmoe", True)])
def test_a_circle_is_learned(tmp_path, method, copy):
    path = write(tmp_path / "circle.npz", check_ins(*walks()))
    model = SequenceConfig(items=10, length=12, dim=16, depth=1, hidden=32, copy=copy)
    settings = TrainSettings(steps=60, batch=24, lr=1e-2, warmup=10, eval_every=1000, weight_decay=0.0)
    one = recipe(path, MoESettings(method, 4), model, train=settings)
    result = train(one, root=tmp_path / "runs", quiet=True).result
    assert result["test"]["HR@1"] > 0.95
    assert result["test"]["loss"] < 0.5
    assert make_task(one).floors()["visit counter, popularity"]["HR@1"] < 0.3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("method", "copy"), [("dense", False), ("intbmoe", True)])
def test_captured_steps_are_the_ordinary_ones(tmp_path, method, copy):
    path = write(tmp_path / "walks.npz", check_ins(*(walk[: 4 + user % 9] for user, walk in enumerate(walks()))))
    model = SequenceConfig(items=10, length=12, dim=16, depth=1, hidden=32, copy=copy)
    found = []
    for capture in (False, True):
        settings = TrainSettings(steps=6, batch=8, lr=1e-2, eval_every=1000, capture=capture)
        one = recipe(path, MoESettings(method, 4), model, train=settings)
        run = train(one, root=tmp_path / str(capture), quiet=True)
        found.append((run.path / "model.safetensors").read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("method", TABLE_2)
def test_every_causal_method_takes_a_step(file, method):
    task = make_task(recipe(file, MoESettings(method, 4), replace(SMALL, copy=True, dropout=0.2)))
    torch.manual_seed(0)
    model = task.make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total, count = task.loss(model, task.prepare(task.split("train").batch(range(3), 0, 0), torch.Generator()))
    aux = intbmoe.aux_loss(model) if any(True for _ in moe_layers(model)) else 0
    (total / count + aux).backward()
    intbmoe.before_step(model, optimizer)
    optimizer.step()
    intbmoe.after_step(model, optimizer)
    assert torch.isfinite(total)
    assert model.items.weight.grad.abs().sum() > 0
    sums = task.evaluate(model.eval(), task.split("test").batch(range(2), 0, 0))
    assert all(torch.isfinite(value) for value in sums.values())


def test_a_method_that_looks_ahead_is_refused(file):
    with pytest.raises(ValueError, match="cannot be used in a causal model"):
        make_task(recipe(file, MoESettings("expert_choice", 4))).make_model()


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_resolve_for_every_set(name):
    one = load_recipe(name)
    assert recipe_from_dict(recipe_to_dict(one)) == one
    assert one.moe.options["residual_scale"] == 0.0, "as the paper on travel"
    assert [variant.moe.name for variant in find_variants(one, "all")] == list(TABLE_2)
    for choice, expected in (("ablations", 7), ("K", 6)):
        variants = find_variants(one, choice)
        assert len(variants) == expected
        for variant in variants:
            with torch.device("meta"):
                model = make_task(replace(one, moe=variant.moe)).make_model()
            assert len(list(moe_layers(model))) == one.model.depth + 1


def test_the_two_check_in_recipes_differ_in_their_data_alone():
    nyc, us = load_recipe("foursquare"), load_recipe("foursquare-us")
    same = replace(us, name=nyc.name, model=replace(us.model, items=nyc.model.items), train=nyc.train)
    assert same == nyc


def test_a_file_of_another_set_is_refused(file):
    one = load_recipe("foursquare")
    with pytest.raises(DataError, match=r"'poi' goes up to 4.*for this file set model.items=5"):
        make_task(replace(one, data=replace(one.data, path=file))).split("train")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SequenceData(source="foursquare"), "source='foursquare'.*'check-ins', 'item-lists', 'table'"),
        (lambda: replace(recipe(), task="travel"), "task='travel'"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_evaluation_does_not_depend_on_the_batches(tmp_path):
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 9, int(rng.integers(3, 30))).tolist() for _ in range(12)] + [[8, 8, 8]]
    path = write(tmp_path / "some.npz", check_ins(*histories))
    task = make_task(recipe(path, MoESettings("intbmoe", 4), replace(SMALL, items=9, length=20, copy=True)))
    torch.manual_seed(0)
    model = task.make_model().double().eval()
    examples = task.split("test")

    def total(size):
        sums = {}
        for start in range(0, len(examples), size):
            indices = range(start, min(start + size, len(examples)))
            batch = task.prepare(examples.batch(indices, 0, 0), None)
            with torch.no_grad():
                for name, value in task.evaluate(model, batch).items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    assert total(1) == pytest.approx(total(5), abs=1e-10) == total(13)
