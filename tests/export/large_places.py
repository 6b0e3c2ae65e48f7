"""A travel model of the paper's widths with thousands of places, and random encoded requests for it."""

import copy

import numpy as np
import torch

import intbmoe
from intbmoe.models.travel import PLACE, PROFILE_TOKENS, TravelConfig, TravelModel
from intbmoe.tasks.serving.requests import Encoded
from intbmoe.tasks.travel.fields import JourneyFields
from intbmoe.tasks.travel.serving import COLUMNS, PlacePredictor, token_count

CODES = 5
"""Codes of each field are below."""
PLACES = 20_000


def large_predictor(method, dtype, device):
    """IntBMoE is precomposed."""
    torch.manual_seed(1)
    config = TravelConfig(depth=2, sessions=40, place_rows=512, cell_rows=16, code_rows=128)
    options = {"experts": 2, "residual_scale": 0.5} if method == "intbmoe" else {}
    model = TravelModel(config, lambda: intbmoe.create(method, config.dim, config.hidden, **options)).eval()
    served = intbmoe.precompose(model, dtype) if method == "intbmoe" else copy.deepcopy(model).to(dtype)
    codes = np.random.default_rng(0).integers(1, CODES, (1 + PLACES, len(PLACE)), dtype=np.int32)
    codes[:, 0] = np.arange(1 + PLACES)
    codes[0] = 0
    sizes = dict.fromkeys(("cells", "regions", "categories", "weathers", "modes", "actions"), CODES)
    about = {"sizes": {"places": PLACES, **sizes, "profile": [CODES] * PROFILE_TOKENS}, "utc_offset": 8.0}
    tensors = {"ids": torch.arange(PLACES), "codes": torch.from_numpy(codes)}
    return PlacePredictor(JourneyFields.read(about, tensors), served.config.sessions, tensors["codes"]).with_model(
        served.to(device)
    )


def encoded_requests(asked, count, seed, sessions=None):
    """Requests with this many sessions, or from one to the most; every other one excludes visited places."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        length = sessions or int(random.integers(1, asked.sessions + 1))
        codes = random.integers(0, 4, (length, len(COLUMNS)), dtype=np.int32)
        for column in (COLUMNS.index("place"), COLUMNS.index("via")):
            codes[:, column] = random.integers(0, len(asked.places) + 1, length)
        places = np.unique(codes[:, COLUMNS.index("place")])
        payload = {
            "profile": random.integers(0, 4, PROFILE_TOKENS, dtype=np.int32),
            "sessions": codes,
            "excluded": (places[places > 0] - 1)[: None if number % 2 else 0],
            "top_n": min(10, asked.limits.top_n),
            "explain": False,
        }
        found.append(Encoded(token_count(length), payload))
    return found
