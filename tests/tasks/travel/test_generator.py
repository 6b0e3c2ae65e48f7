"""The embedded journeys: repeatable, well formed, and worth learning from."""

import dataclasses
import time

import numpy as np
import pytest

from intbmoe.tasks.travel.generator import make_journeys

NEGATIVES = 64


@pytest.fixture(scope="module")
def journeys():
    return make_journeys()


def arrays_of(data):
    for part in (data.places, *data.shards):
        yield from (getattr(part, field.name) for field in dataclasses.fields(part))


def test_the_same_seed_gives_the_same_journeys():
    small = {"users": 50, "weeks": 3, "sessions": (5, 20), "side": 3}
    first, again, other = (make_journeys(seed=seed, **small) for seed in (1, 1, 2))
    assert all(map(np.array_equal, arrays_of(first), arrays_of(again)))
    assert not np.array_equal(first.shards[0].place, other.shards[0].place)
    assert (first.valid_from, first.test_from) == (again.valid_from, again.test_from)


def test_it_takes_seconds_and_splits_by_time():
    began = time.process_time()
    data = make_journeys()
    assert time.process_time() - began < 5
    shard = data.shards[0]
    sessions = np.diff(shard.offsets)
    assert len(sessions) == 2000
    assert (sessions.min(), sessions.max()) == (40, 80)
    assert np.mean(shard.time < data.valid_from) == pytest.approx(0.8, abs=1e-3)
    assert np.mean(shard.time >= data.test_from) == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("users", [1, 7, 5000])  # more than one block of people
def test_the_arrays_are_as_the_schema_says(users):
    data = make_journeys(seed=users, users=users, weeks=2, sessions=(1, 6), side=3)
    places, shard, sizes = data.places, data.shards[0], data.sizes
    assert (np.diff(places.ids) > 0).all()
    assert len(places.ids) == sizes.places
    assert shard.offsets[0] == 0
    assert shard.offsets[-1] == len(shard.time)
    assert len(shard.offsets) == len(shard.profile) + 1 == users + 1
    user = np.repeat(np.arange(users), np.diff(shard.offsets))
    assert (np.diff(shard.time)[np.diff(user) == 0] > 5 * 60 * 1000).all()  # otherwise two would count as one session
    for row in (shard.place, shard.via):
        assert row.min() >= -1
        assert row.max() < sizes.places
    coded = (
        (np.append(places.cell, shard.cell), sizes.cells),
        (np.append(places.region, shard.region), sizes.regions),
        (places.category, sizes.categories),
        (shard.weather, sizes.weathers),
        (shard.mode, sizes.modes),
        (shard.action, sizes.actions),
        *zip(shard.profile.T, sizes.profile, strict=True),
    )
    for codes, size in coded:  # 1…n−1 all occur, as after a preparation
        assert codes.dtype == np.int32
        assert np.array_equal(np.union1d(codes, [0]), np.arange(size))
    assert {array.dtype for array in (places.ids, shard.time, shard.offsets, places.cell_offsets)} == {np.dtype("i8")}
    for code in range(sizes.cells):
        members = places.cell_places[places.cell_offsets[code] : places.cell_offsets[code + 1]]
        assert np.array_equal(members, np.flatnonzero(places.cell == code))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"users=0 is not allowed"):
        make_journeys(users=0)
    with pytest.raises(ValueError, match=r"sessions=\(5, 99\) is not allowed.*≤ 42"):
        make_journeys(weeks=1, sessions=(5, 99))


def test_context_tells_much_more_than_a_counter_of_visits(journeys):
    """Count tables of (who, when, where from) → category, scored by taste, compared with the visit counter.

    At least half of the negatives are places in the same cell, so that the neighbourhood alone decides nothing.
    """
    places, shard = journeys.places, journeys.shards[0]
    random = np.random.default_rng(0)
    user = np.repeat(np.arange(len(shard.profile)), np.diff(shard.offsets))
    day, hour = np.divmod(shard.time // 3_600_000, 24)
    weekend = ((day + 3) % 7 >= 5).astype(int)  # 1 January 1970 was a Thursday
    first_of_user = np.diff(user, prepend=-1) > 0
    before = np.where((np.diff(day, prepend=-1) == 0) & ~first_of_user, places.category[np.roll(shard.place, 1)], 0)
    context = (shard.profile[user, 0], weekend, hour // 2, before)
    train = shard.time < journeys.valid_from
    shape = (journeys.sizes.profile[0], 2, 12, journeys.sizes.categories, journeys.sizes.categories)
    table = np.full(shape, 0.05)
    np.add.at(table, (*(column[train] for column in context), places.category[shard.place[train]]), 1)
    table = np.log(table / table.sum(-1, keepdims=True))
    worth = np.array([0, 7, 2, -7])[shard.profile[user, 2]]

    hits = {"counter": 0, "context": 0, "both": 0}
    tests = random.choice(np.flatnonzero(shard.time >= journeys.test_from), 1500, replace=False)
    for session in tests:
        target = shard.place[session]
        cell = places.cell[target]
        near = places.cell_places[places.cell_offsets[cell] : places.cell_offsets[cell + 1]]
        near = random.permutation(near[near != target])[:50]
        others = np.append(near, random.integers(len(places.ids), size=NEGATIVES - len(near)))
        candidates = np.append(others[others != target], target)
        visits = (shard.place[shard.offsets[user[session]] : session, None] == candidates).sum(0)
        likely = table[tuple(column[session] for column in context)][places.category[candidates]]
        likely = likely + worth[session] * places.score[candidates]
        strangers_home = (places.category[candidates] == 1) & (visits == 0)
        both = likely + 2.5 * (visits > 0) + np.log1p(visits) - 6 * strangers_home
        for name, score in (("counter", visits.astype(float)), ("context", likely), ("both", both)):
            score = score + random.uniform(0, 1e-6, size=len(score))  # ties are broken at random
            hits[name] += (score > score[-1]).sum() < 5
    rates = {name: number / len(tests) for name, number in hits.items()}
    assert 0.4 < rates["counter"] < 0.6
    assert rates["context"] > 0.55
    assert 0.75 < rates["both"] < 0.95
