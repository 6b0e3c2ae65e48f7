"""Journeys with one planted rule of known strength: a task whose best possible score is known.

The destination of a trip depends on the scenario (the hour and the weather) and the cell that the user is in, and on
nothing else:

    with probability ``strength``     a place of the cell ``rule[scenario, cell]``, each equally likely
    otherwise                         any place, each equally likely

Hours, weather and cells are drawn uniformly and independently. Each row and each column of the rule has every cell
equally often, so neither the scenario alone nor the cell alone says anything about the destination. Nor do the user,
the history and popularity, because cells have equally many places. Only scenario and cell together do. A model that
adds up what each tells it stays at chance; one with room for the whole table reaches ``ceiling``.
"""

import numpy as np

from intbmoe.checks import require, require_positive_int
from intbmoe.tasks.travel.candidates import TOP, Candidates, session_keys
from intbmoe.tasks.travel.data import HOUR, PROFILE_FEATURES, JourneyData, Sessions, Sizes, bare_places, split_times
from intbmoe.tasks.travel.windows import split_ranges

START = 1_704_067_200_000  # Monday, 1 January 2024, 00:00 UTC
WEEK = 7 * 24 * HOUR
HOURS = np.arange(7, 23)  # when people set out
WEATHERS = 4
SCENARIOS = len(HOURS) * WEATHERS
CELLS = 64  # divides the number of scenarios: otherwise no rule could be balanced
PLACES = 4  # per cell
SESSIONS = 60  # per user: one each Monday, so that the weekday and the time since the last one say nothing


def make_rule(seed: int = 0, cells: int = CELLS) -> np.ndarray:
    """Return (scenarios, cells): the cell, from 0, that the rule leads to; random Latin squares, stacked."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and every command imports all tasks

    require(SCENARIOS % cells == 0, "cells", cells, f"a divisor of {SCENARIOS}")
    random = np.random.default_rng([seed, 0])
    rule = np.empty((SCENARIOS, cells), np.int64)
    for scenario in range(SCENARIOS):
        if scenario % cells == 0:
            used = np.zeros((cells, cells), bool)  # (from, to)
        # The rest of a Latin square always contains another row: here the cheapest one at random costs.
        here, rule[scenario] = linear_sum_assignment(np.where(used, np.inf, random.random((cells, cells))))
        used[here, rule[scenario]] = True
    return rule


def make_planted(strength: float, users: int = 2000, seed: int = 0, cells: int = CELLS) -> JourneyData:
    require(0 < strength <= 1, "strength", strength, "a number above 0, at most 1")
    require_positive_int("users", users)
    random = np.random.default_rng([seed, 1])
    number = users * SESSIONS
    hour, weather, cell = (random.integers(many, size=number) for many in (len(HOURS), WEATHERS, cells))
    ruled = make_rule(seed, cells)[hour * WEATHERS + weather, cell]
    chosen = np.where(random.random(number) < strength, ruled, random.integers(cells, size=number))
    row_of = random.permutation(cells * PLACES)  # otherwise a place's number would show its cell
    place = row_of[chosen * PLACES + random.integers(PLACES, size=number)]
    week = np.tile(np.arange(SESSIONS), users)
    time = START + week * WEEK + HOURS[hour] * HOUR + random.integers(HOUR, size=number)

    place_cell = np.argsort(row_of) // PLACES + 1
    none = np.zeros(number, np.int32)
    shard = Sessions(
        offsets=np.arange(users + 1, dtype=np.int64) * SESSIONS,
        profile=np.zeros((users, PROFILE_FEATURES), np.int32),
        time=time,
        place=place.astype(np.int32),
        cell=(cell + 1).astype(np.int32),
        weather=(weather + 1).astype(np.int32),
        via=none - 1,
        **dict.fromkeys(("action", "region", "mode"), none),
    )
    return JourneyData(
        bare_places(place_cell.astype(np.int32), cells + 1),
        [shard],
        Sizes(len(place_cell), cells + 1, 1, 1, WEATHERS + 1, 1, 1, (1,) * PROFILE_FEATURES),
        *split_times(lambda: [time]),
    )


def ceiling_sums(data: JourneyData, rule: np.ndarray, by: str, near: int) -> dict[str, float]:
    """Return sums over the test sessions of the best expected metrics, on the models' candidates.

    A model scores each candidate separately, from what it knows about the session. Then no order is better than this:
    first the candidates in the rule's cell, then all others, both in random order.
    """
    candidates = Candidates(data.places, near=near)
    sums: dict[str, float] = {"count": 0.0}
    for number, shard in enumerate(data.shards):
        first, last = split_ranges(data, shard, "test", by)
        at = np.concatenate([np.arange(start, stop) for start, stop in zip(first, last, strict=True)])
        drawn = candidates.draw(shard.place[at], session_keys(0, 0, number, at))
        hour = shard.time[at] // HOUR % 24 - HOURS[0]
        ruled = 1 + rule[hour * WEATHERS + shard.weather[at] - 1, shard.cell[at] - 1]
        likely = data.places.cell[drawn] == ruled[:, None]
        many = likely.sum(1)
        before = np.where(likely[:, 0], 0, many)  # candidates that certainly come first
        equal = np.where(likely[:, 0], many, drawn.shape[1] - many)  # the true place is among these, at random
        for name, value in expected_ranking(before, equal).items():
            sums[name] = sums.get(name, 0.0) + value
        sums["count"] += len(at)
    return sums


def expected_ranking(before: np.ndarray, equal: np.ndarray) -> dict[str, float]:
    """Return sums of HR@n and NDCG@n, if the rank is uniform over the ``equal`` ranks after the first ``before``."""
    rank = np.arange(1, max(TOP) + 1)
    chance = ((rank > before[:, None]) & (rank <= (before + equal)[:, None])) / equal[:, None]
    gain = 1 / np.log2(1 + rank)
    hits = {f"HR@{top}": float(chance[:, :top].sum()) for top in TOP}
    return hits | {f"NDCG@{top}": float((chance * gain)[:, :top].sum()) for top in TOP if top > 1}
