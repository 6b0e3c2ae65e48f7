"""Names and coordinates of results, and the box around them."""

import numpy as np
import pytest
import torch

from intbmoe.tasks.travel.described import DescribedPlaces, viewport


@pytest.mark.parametrize(
    ("longitudes", "west", "east"),
    [
        ([10, 12, 11], 10, 12),
        ([-170, 175, 179], 175, -170),
        ([-1, 1], -1, 1),
        ([5], 5, 5),
        ([180, -180], 180, -180),
        ([-120, 0, 120, 121], 0, -120),
    ],
)
def test_the_viewport_is_the_narrowest_box(longitudes, west, east):
    box = viewport([(longitude, latitude) for latitude, longitude in enumerate(longitudes)])
    assert (box["west"], box["east"]) == (west, east)
    assert (box["south"], box["north"]) == (0, len(longitudes) - 1)
    assert all((longitude - west) % 360 <= (east - west) % 360 for longitude in longitudes)


def test_what_is_not_known_is_left_out():
    names = ["Café", "", "Tor 7"]
    text = [name.encode() for name in names]
    tensors = {
        "names": torch.tensor(list(b"".join(text)), dtype=torch.uint8),
        "name_ends": torch.tensor(np.cumsum([len(name) for name in text])),
        "locations": torch.tensor([[8.5, 47.0], [np.nan, np.nan], [8.75, 47.5]], dtype=torch.float64),
    }
    ids, scores = np.array([7, 8, 9]), np.array([3.0, 2.0, 1.0, -np.inf])
    answer = DescribedPlaces.read(tensors).results(np.array([2, 1, 0, 2]), scores, ids, 10)
    assert answer["results"] == [
        {"id": 9, "score": 3.0, "name": "Tor 7", "longitude": 8.75, "latitude": 47.5},
        {"id": 8, "score": 2.0},
        {"id": 7, "score": 1.0, "name": "Café", "longitude": 8.5, "latitude": 47.0},
    ]
    assert answer["viewport"] == {"west": 8.5, "south": 47.0, "east": 8.75, "north": 47.5}
    plain = DescribedPlaces.read({}).results(np.array([2, 1, 0, 2]), scores, ids, 2)
    assert plain == {"results": [{"id": 9, "score": 3.0}, {"id": 8, "score": 2.0}]}
