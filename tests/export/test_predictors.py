"""An answer depends only on its request, and is what the model of the task would say."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_predictors import ITEMS, KINDS, VIT, bfloat16, predictor, requests, travel_catalogue

from fake_journeys import fake_journeys
from intbmoe.export.golden import ask, compare_rankings
from intbmoe.models.travel import FEEDBACK, SCENARIO
from intbmoe.tasks.serving.requests import from_wire, to_wire
from intbmoe.tasks.travel.examples import JourneyReader
from intbmoe.tasks.travel.serving import COLUMNS
from intbmoe.tasks.travel.windows import WINDOW
from intbmoe.tasks.vision.decode import middle_square, whole_square
from intbmoe.tasks.vision.examples import ImageExamples
from intbmoe.tasks.vision.serving import ClassifyPredictor
from intbmoe.tasks.vision.settings import Augmentation
from intbmoe.tasks.vision.source import ArrayImages, Normalisation

METHODS = {"classify": ("dense", "intbmoe", "soft", "expert_choice"), "items": ("intbmoe", "switch", "lory")}
METHODS |= {"places": ("dense", "intbmoe", "lory", "soft_causal"), "generate": ("dense", "intbmoe", "lory", "vmoe")}
CASES = [(kind, method) for kind in KINDS for method in METHODS[kind]]
RANKED = ("classify", "items", "places")


def equal(one, other, tolerance):
    """The same text, or the same ranking up to near ties; the same blocks if both name them."""
    if "text" in one:
        same = all(one[name] == other[name] for name in ("text", "finished", "new_tokens"))
        return same and abs(one["score"] - other["score"]) <= tolerance
    return compare_rankings(one["results"], other["results"], tolerance) is None


@pytest.mark.parametrize(("kind", "method"), CASES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_batch_mates_their_order_and_their_lengths_change_nothing(kind, method, data):
    asked = predictor(kind, method)
    pool = requests(kind, 8)
    chosen = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    answers = asked.answer([asked.encode(pool[number]) for number in chosen])
    for number, answer in zip(chosen, answers, strict=True):
        alone = ask(asked, pool[number])
        assert equal(alone, answer, 1e-10)
        for name in ("tokens", "blocks"):
            assert alone.get(name) == answer.get(name)
        if kind in RANKED:
            assert [entry["id"] for entry in alone["results"]] == [entry["id"] for entry in answer["results"]]


@pytest.mark.parametrize("kind", RANKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_narrow_types_batches_change_no_more_than_rounding(kind, dtype):
    """Entries may change places only if their scores differ by less than rounding."""
    asked = predictor(kind, "intbmoe", dtype) if dtype == torch.float32 else bfloat16(kind)
    pool = requests(kind, 16, seed=3)
    together = asked.answer([asked.encode(request) for request in pool])
    for request, answer in zip(pool, together, strict=True):
        alone = ask(asked, request)
        largest = max(abs(entry["score"]) for entry in alone["results"])
        assert equal(alone, answer, 16 * torch.finfo(dtype).eps * largest)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_through_the_wire(kind):
    asked = predictor(kind)
    batch = [asked.encode(request) for request in requests(kind, 5)]
    sent = [from_wire(to_wire(encoded)) for encoded in batch]
    assert asked.answer(sent) == asked.answer(batch)
    assert [encoded.tokens for encoded in sent] == [encoded.tokens for encoded in batch]
    assert asked.answer([]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_in_two_processes_or_one_is_the_same_class_of_checks(kind):
    """The predictor itself encodes with the half that has no weights."""
    asked = predictor(kind)
    assert asked.request_schema["examples"]
    for example in asked.request_schema["examples"]:
        answer = ask(asked, example)
        assert answer.keys() & {"results", "text"}


def as_png(pixels):
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def test_images_are_read_and_classified_as_in_evaluation():
    asked = predictor("classify")
    array = np.random.default_rng(3).integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
    examples = ImageExamples(ArrayImages(array, np.zeros(5, np.int64)), asked.normalisation, 8, Augmentation())
    likely = asked.model(examples.batch(range(5), 0, 0)["images"].double()).softmax(1)
    for number, expected in enumerate(likely):
        results = ask(asked, {"image": as_png(array[number, ..., 0]), "top_n": 7})["results"]
        assert sorted(entry["id"] for entry in results) == list(range(7))
        assert all(entry["name"] == "abcdefg"[entry["id"]] for entry in results)
        assert [entry["score"] for entry in results] == pytest.approx(expected.sort(descending=True)[0].tolist())
        assert all(entry["score"] == pytest.approx(expected[entry["id"]].item()) for entry in results)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("cropped", [False, True])
def test_images_of_any_size_are_cut_from_the_middle(channels, cropped):
    """The edge is cut off, as for ImageNet, or not, as for images stored at the model's size."""
    config = replace(VIT, channels=channels)
    normalisation = Normalisation((0.3,) * channels, (0.4,) * channels)
    encoder = ClassifyPredictor(config, normalisation, ("a", "b"), middle_square if cropped else whole_square)
    random = np.random.default_rng(4)
    for height, width in ((8, 8), (8, 20), (21, 8), (100, 90)):
        array = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        pixels = encoder.encode({"image": as_png(array)}).payload["pixels"]
        image = Image.fromarray(array).convert("L" if channels == 1 else "RGB")
        if cropped:
            expected = middle_square(image, 8)
        elif min(height, width) == 8:
            top, left = (height - 8) // 2, (width - 8) // 2
            expected = np.asarray(image)[top : top + 8, left : left + 8]
        else:
            expected = pixels
        assert pixels.shape == (8, 8, channels)
        assert np.array_equal(pixels, expected.reshape(8, 8, channels))


def test_items_are_what_the_model_says():
    asked = predictor("items")
    for request in requests("items", 10):
        request = {**request, "top_n": 60 if request["top_n"] > 4 else request["top_n"]}
        items = torch.tensor([request["history"][-ITEMS.length :]]) - 1
        scores = asked.model(items)[0]
        if request["visited"] == "exclude":
            scores[torch.tensor(request["history"]) - 1] = -torch.inf
        order = scores.argsort(descending=True, stable=True)
        order = order[scores[order] > -torch.inf][: request["top_n"]]
        results = ask(asked, request)["results"]
        assert [entry["id"] for entry in results] == (order + 1).tolist()
        assert [entry["score"] for entry in results] == pytest.approx(scores[order].tolist(), abs=1e-12)


def user_request(shard, fields, user, stop):
    """A request with the sessions of a user up to ``stop``, which is now."""
    start = int(shard.offsets[user])
    history = []
    for row in range(start, stop):
        codes = {name: int(getattr(shard, name)[row]) for name in ("cell", "region", "weather", "mode", "action")}
        codes |= {name: int(getattr(shard, name)[row]) + 1 for name in ("place", "via")}
        known = {name: fields.value(name, code) for name, code in codes.items() if code}
        history.append({"time": int(shard.time[row]), **known})
    now = {name: history[-1][name] for name in ("time", "cell", "region", "weather") if name in history[-1]}
    profile = zip(fields.profile, shard.profile[user].tolist(), strict=True)
    return {"history": history[:-1], "now": now, "profile": {name: code for name, code in profile if code}}


@pytest.mark.parametrize("method", ["dense", "intbmoe", "switch", "lory", "soft_causal"])
@pytest.mark.parametrize("user", [2, 4])
def test_journeys_are_read_and_scored_as_in_training(user, method):
    """With all places as candidates, answers have the scores that the model gives to the reader's window."""
    asked, data = predictor("places", method), fake_journeys()
    shard = data.shards[0]
    reader = JourneyReader(data, asked.sessions, utc_offset=8.0)
    codes = travel_catalogue()[1]["codes"]
    for stop in range(int(shard.offsets[user]) + 1, int(shard.offsets[user + 1]) + 1, 3):
        length = min(stop - int(shard.offsets[user]), asked.sessions)
        window = np.rec.array([(user, stop, length, 1)], WINDOW)
        arrays = reader.new_arrays(1)
        reader.fill(arrays, np.array([0]), 0, window, 0, 0)
        batch = {name: torch.from_numpy(array[:, :length] if array.ndim > 1 and name != "profile" else array)
                 for name, array in arrays.items()}  # fmt: skip
        batch["targets"] = torch.zeros_like(batch["mask"])
        batch["targets"][:, -1] = True
        batch["candidates"] = codes[1:].expand(1, length, -1, -1)
        scores = asked.model(batch)[0]
        encoded = asked.encode({**user_request(shard, asked.fields, user, stop), "top_n": 90})
        sessions = {name: encoded.payload["sessions"][:, place] for place, name in enumerate(COLUMNS)}
        for group, names in (("scenario", SCENARIO), ("feedback", FEEDBACK)):
            known = length if group == "scenario" else length - 1
            read = np.stack([sessions[name] for name in names], 1)
            assert np.array_equal(read[:known], arrays[group][0, :known])
        order = scores.argsort(descending=True, stable=True)
        results = asked.answer([encoded])[0]["results"]
        assert [entry["id"] for entry in results] == data.places.ids[order].tolist()
        assert [entry["score"] for entry in results] == pytest.approx(scores[order].tolist(), abs=1e-12)


@pytest.mark.parametrize("kind", ["items", "places"])
def test_nothing_visited_is_recommended_where_that_is_excluded(kind):
    asked = predictor(kind)
    for request in requests(kind, 12, seed=5):
        places = request["history"] if kind == "items" else [session["place"] for session in request["history"]]
        found = {
            policy: {entry["id"] for entry in ask(asked, {**request, "visited": policy, "top_n": 60})["results"]}
            for policy in ("allow", "exclude")
        }
        assert not found["exclude"] & set(places)
        if kind == "items":
            assert found["allow"] == found["exclude"] | set(places)


@pytest.mark.parametrize("kind", KINDS)
def test_explained_blocks_are_those_of_valid_tokens_only(kind):
    asked = predictor(kind)
    batch = [asked.encode({**request, "explain": True}) for request in requests(kind, 4)]
    for encoded, answer in zip(batch, asked.answer(batch), strict=True):
        tokens = len(answer["tokens"])
        if kind == "classify":
            assert tokens == encoded.tokens - 1  # the class token does not go through the blocks
        elif kind != "generate":
            assert tokens == encoded.tokens
        assert len(answer["blocks"]) == {"items": 3, "places": 3}.get(kind, 2)
        for layer in answer["blocks"]:
            assert layer["choices"] == 4
            assert len(layer["tokens"]) == tokens
            assert all(len(set(token)) == 2 and set(token) <= set(range(4)) for token in layer["tokens"])


def test_a_dense_model_has_no_blocks_to_explain():
    asked = predictor("places", "dense")
    assert ask(asked, {**requests("places", 1)[0], "explain": True})["blocks"] == []
