"""Golden requests: made from validation data, answered the same again; a difference is detected and reported."""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image
from small_predictors import CELL_VALUES, ITEMS, KINDS, bfloat16, predictor

from fake_journeys import HOUR, fake_journeys
from intbmoe.export.golden import ask, compare_answers, compare_rankings, make_golden
from intbmoe.recipes import load_recipe
from intbmoe.tasks import find_task
from intbmoe.tasks.language.packed import TokenExamples
from intbmoe.tasks.sequences.examples import HeldOutEvents
from intbmoe.tasks.sequences.source import ItemSequences
from intbmoe.tasks.travel.examples import JourneyExamples, JourneyReader

kinds = pytest.mark.parametrize("kind", KINDS)
RECIPES = {"classify": "digits", "items": "beauty", "places": "journeys", "generate": "stdlib"}


class Pictures:
    """The part of ``ImageExamples`` that golden requests need."""

    def __init__(self):
        self.images = self

    def __len__(self):
        return 30

    def image(self, index):
        return Image.fromarray(np.random.default_rng(index).integers(0, 256, (8, 8), dtype=np.uint8))


class SmallTask:
    """A task's recipe, and a validation split that fits the small predictors."""

    def __init__(self, kind):
        self.kind, self.recipe = kind, load_recipe(RECIPES[kind])

    def golden_requests(self, predictor, count):
        return find_task(self.recipe.task).golden_requests(self, predictor, count)

    def held_out(self):
        return self.split("valid")

    def split(self, name):
        assert name == "valid"
        if self.kind == "classify":
            return Pictures()
        if self.kind == "items":
            items = np.random.default_rng(0).integers(0, 60, 200)
            return HeldOutEvents(ItemSequences(items, np.arange(0, 201, 10), 60), "valid", ITEMS.length)
        if self.kind == "places":
            return JourneyExamples(JourneyReader(fake_journeys(), 6, 8.0), "valid")
        text = "the quick brown fox — jumps over the lazy dog\n" * 20
        return TokenExamples(np.frombuffer(text.encode(), np.uint8), 24)


def differences(asked, golden):
    found = [compare_answers(entry, ask(asked, entry["request"])) for entry in golden]
    return [difference for difference in found if difference is not None]


def damaged(asked):
    """The same predictor with the weights of the first mixture's blocks negated."""
    model = copy.deepcopy(asked.model)
    with torch.no_grad():
        blocks = [parameter for parameter in model.parameters() if parameter.dim() == 3]
        blocks[0].neg_()
    return asked.with_model(model)


@kinds
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
def test_the_same_model_answers_its_golden_requests_and_a_damaged_one_does_not(kind, narrow):
    asked = bfloat16(kind) if narrow else predictor(kind, "intbmoe", torch.float32)
    golden = json.loads(json.dumps(make_golden(asked, SmallTask(kind), 6)))
    assert 1 <= len(golden) <= 6
    assert differences(asked, golden) == []
    assert differences(damaged(asked), golden)
    if kind != "generate":
        scores = [entry["score"] for one in golden for entry in one["answer"]["results"]]
        assert golden[0]["tolerance"] < (0.5 if narrow else 1e-4) * max(map(abs, scores))


@kinds
def test_golden_answers_outlive_a_change_of_rounding(kind):
    """The same weights at twice the precision: another machine's rounding makes no larger difference."""
    asked = predictor(kind, "intbmoe", torch.float32)
    golden = make_golden(asked, SmallTask(kind), 6)
    assert differences(asked.with_model(copy.deepcopy(asked.model).double()), golden) == []


def test_golden_journeys_are_those_of_the_users():
    """Each request holds a window's sessions in the data's own values, the last one as the current session."""
    data = fake_journeys()
    golden = make_golden(predictor("places", "intbmoe", torch.float32), SmallTask("places"), 6)
    times = np.concatenate([shard.time for shard in data.shards])
    for entry in golden:
        request = entry["request"]
        assert 600 * HOUR <= request["now"]["time"] < 800 * HOUR
        assert all(session["time"] in times for session in request["history"])
        assert len(request["history"]) <= 5
        assert {session.get("cell", 11) for session in request["history"]} <= set(CELL_VALUES.tolist())
        assert {session.get("place", 0) % 3 for session in request["history"]} <= {0}
    assert {entry["request"]["visited"] for entry in golden} == {"allow", "exclude"}


def ranking(*pairs):
    return [{"id": one, "score": score} for one, score in pairs]


def test_near_equals_may_change_places_and_nothing_else_may():
    before = ranking((1, 3.0), (2, 2.0), (3, 1.999), (4, 1.0))
    assert compare_rankings(before, ranking((1, 3.001), (3, 2.0), (2, 1.999), (4, 1.0)), 0.01) is None
    assert compare_rankings(before, ranking((1, 3.0), (2, 2.0), (3, 1.999), (9, 1.001)), 0.01) is None
    for wrong in (
        ranking((2, 3.0), (1, 2.0), (3, 1.999), (4, 1.0)),
        ranking((1, 3.0), (2, 2.0), (3, 1.999), (4, 0.9)),
        ranking((1, 3.0), (9, 2.0), (3, 1.999), (4, 1.0)),
        ranking((1, 3.0), (2, 2.0), (3, 1.999)),
        ranking((1, float("nan")), (2, 2.0), (3, 1.999), (4, 1.0)),
    ):
        assert compare_rankings(before, wrong, 0.01) is not None
