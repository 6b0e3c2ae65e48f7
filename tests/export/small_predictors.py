"""A small predictor of each kind, with weights away from their trivial start, and random requests for it."""

import base64
import copy
import io
from dataclasses import asdict
from functools import cache

import numpy as np
import torch
from PIL import Image

import intbmoe
from fake_journeys import fake_journeys
from intbmoe.models.llama import Llama, LlamaConfig
from intbmoe.models.sequence import SequenceConfig, SequenceModel
from intbmoe.models.travel import TravelConfig, TravelModel
from intbmoe.models.vit import ViT, ViTConfig
from intbmoe.tasks.language.serving import GeneratePredictor
from intbmoe.tasks.language.vocabulary import ByteVocabulary
from intbmoe.tasks.sequences.serving import ItemPredictor
from intbmoe.tasks.travel.examples import place_codes
from intbmoe.tasks.travel.fields import JourneyFields
from intbmoe.tasks.travel.serving import PlacePredictor
from intbmoe.tasks.vision.serving import ClassifyPredictor
from intbmoe.tasks.vision.source import Normalisation

KINDS = ("classify", "items", "places", "generate")
TINY = {
    "intbmoe": {"experts": 3, "blocks": 4, "top_k": 2, "code_dim": 3, "router_dim": 5, "hyper_dim": 4},
    "lory": {"segment": 3},
}
SIZES = {"dim": 8, "depth": 2, "hidden": 12}
VIT = ViTConfig(image_size=8, patch_size=2, channels=1, classes=7, heads=2, moe_layers=(0, 1), **SIZES)
ITEMS = SequenceConfig(items=60, length=12, copy=True, **SIZES)
TRAVEL = TravelConfig(heads=2, sessions=6, place_rows=31, cell_rows=8, code_rows=64, **SIZES)
LLAMA = LlamaConfig(vocabulary=257, dim=12, depth=2, heads=3, hidden=12, init_std=0.5)
LENGTH = 24
HOUR = 3_600_000
CELL_VALUES = np.array([11, 15, 16, 70, 71, 90])
"""What the data called the cells with codes 1 to 6."""


def _ffn(method, dim):
    return None if method == "dense" else lambda: intbmoe.create(method, dim, 12, **TINY.get(method, {}))


def _model(kind, method):
    torch.manual_seed(1)
    if kind == "classify":
        return ViT(VIT, _ffn(method, VIT.dim))
    if kind == "items":
        return SequenceModel(ITEMS, _ffn(method, ITEMS.dim))
    if kind == "places":
        return TravelModel(TRAVEL, _ffn(method, TRAVEL.dim))
    return Llama(LLAMA, _ffn(method, LLAMA.dim))


def travel_catalogue():
    """What an artifact says about the fake places."""
    data = fake_journeys()
    tensors = {"ids": torch.from_numpy(data.places.ids), "codes": torch.from_numpy(place_codes(data.places))}
    tensors["values.cell"] = torch.from_numpy(CELL_VALUES)
    return {"sizes": asdict(data.sizes), "utc_offset": 8.0}, tensors


@cache
def predictor(kind, method="intbmoe", dtype=torch.float64):
    """IntBMoE is precomposed."""
    model = _model(kind, method).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        if kind == "places":  # the row for missing values
            for table in (model.places, model.cells, model.codes):
                table.tables[-1] = 0
    if method == "intbmoe":
        model = intbmoe.precompose(model)
    model = model.to(dtype)
    if kind == "classify":
        return ClassifyPredictor(VIT, Normalisation((0.3,), (0.4,)), tuple("abcdefg")).with_model(model)
    if kind == "items":
        return ItemPredictor(ITEMS, first_id=1).with_model(model)
    if kind == "places":
        about, tensors = travel_catalogue()
        return PlacePredictor(JourneyFields.read(about, tensors), TRAVEL.sessions, tensors["codes"]).with_model(model)
    return GeneratePredictor(ByteVocabulary(256), LENGTH).with_model(model)


def png(random, width=8, height=8):
    content = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (height, width), dtype=np.uint8)).save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def make_request(kind, random):
    """A random request, from the shortest length to beyond what the model reads."""
    maybe = lambda value: None if random.random() < 0.2 else int(value)  # noqa: E731
    ranking = {"top_n": int(random.integers(1, 8)), "explain": bool(random.random() < 0.3)}
    if kind == "classify":
        return {
            "image": png(random, *random.integers(6, 20, 2).tolist()),
            **ranking,
            "top_n": int(random.integers(1, 8)),
        }
    visited = {"visited": ("allow", "exclude")[int(random.integers(2))]}
    if kind == "items":
        return {"history": random.integers(1, 61, random.integers(1, 20)).tolist(), **ranking, **visited}
    if kind == "generate":
        prompt = "".join(random.choice(list("abc é\n"), random.integers(0, 15)))
        temperature = float(random.choice([0.0, 0.7, 1.5]))
        return {"prompt": prompt, "max_tokens": int(random.integers(1, 7)), "temperature": temperature,
                "seed": int(random.integers(100)), "explain": ranking["explain"]}  # fmt: skip
    times = np.sort(random.integers(0, 1000 * HOUR, random.integers(1, 12))).tolist()
    sessions = [
        {
            "time": time,
            "cell": maybe(random.choice(CELL_VALUES)),
            "region": maybe(random.integers(1, 5)),
            "weather": maybe(random.integers(1, 4)),
            "place": maybe(3 * random.integers(90)),
            "mode": maybe(random.integers(1, 4)),
            "action": maybe(random.integers(1, 4)),
            "via": maybe(3 * random.integers(90)),
        }
        for time in times
    ]
    now = {name: sessions[-1][name] for name in ("time", "cell", "region", "weather")}
    profile = {f"profile_{number}": maybe(random.integers(1, 4)) for number in range(1, 7)}
    return {"history": sessions[:-1], "now": now, "profile": profile, **ranking, **visited}


def requests(kind, count, seed=0):
    random = np.random.default_rng(seed)
    return [make_request(kind, random) for _ in range(count)]


def bfloat16(kind, method="intbmoe"):
    """The float32 predictor with its weights in bf16."""
    wide = predictor(kind, method, torch.float32)
    return wide.with_model(copy.deepcopy(wide.model).bfloat16())
