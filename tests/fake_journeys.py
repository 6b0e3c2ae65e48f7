"""A tiny JourneyData of random arrays with known shapes: 90 places, two shards, some users without sessions."""

import numpy as np

from intbmoe.tasks.travel.data import JourneyData, Places, Sessions, Sizes, group_by_cell

PLACES, CELLS, HOUR = 90, 7, 3_600_000
SHARDS = ((5, 0, 13, 1, 30), (8, 3, 0, 21))
"""How many sessions each user of each shard has."""


def fake_places(cell=None):
    rng = np.random.default_rng(1)
    cell = rng.integers(1, CELLS, PLACES).astype(np.int32) if cell is None else np.asarray(cell, np.int32)
    codes = [rng.integers(1, 5, len(cell)).astype(np.int32) for _ in range(2)]
    score = rng.random(len(cell)).astype(np.float32)
    return Places(np.arange(len(cell)) * 3, score, cell, *codes, *group_by_cell(cell, int(cell.max()) + 1))


def fake_shard(counts, seed):
    """Sessions of users with ``counts`` each, at times of the same 1,000 hours; a tenth have no place."""
    rng = np.random.default_rng(seed)
    total = sum(counts)
    time = np.concatenate([np.sort(rng.integers(0, 1000 * HOUR, count)) for count in counts])
    place = rng.integers(0, PLACES, total)
    columns = {
        "place": np.where(rng.random(total) < 0.1, -1, place),
        "via": np.where(rng.random(total) < 0.7, -1, rng.integers(0, PLACES, total)),
        "cell": rng.integers(0, CELLS, total),
        **{name: rng.integers(0, 4, total) for name in ("action", "region", "weather", "mode")},
    }
    return Sessions(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        profile=rng.integers(0, 4, (len(counts), 6)).astype(np.int32),
        time=time.astype(np.int64),
        **{name: column.astype(np.int32) for name, column in columns.items()},
    )


def fake_journeys(counts=SHARDS):
    shards = [fake_shard(shard, 10 + number) for number, shard in enumerate(counts)]
    sizes = Sizes(PLACES, CELLS, 5, 5, 4, 4, 4, (4,) * 6)
    return JourneyData(fake_places(), shards, sizes, valid_from=600 * HOUR, test_from=800 * HOUR)
