"""Predictions that need no learning, on the same candidates as the models: popularity, and each user's own visits.

    popularity       the place with the most visits by all users in the training split
    visit counter    the place with the most visits by this user before the session, in whichever split; ties by
                     popularity

A place that ties with the true one counts as ranked before it.
"""

from collections.abc import Iterator

import numpy as np

from intbmoe.tasks.travel.candidates import NEAR, Candidates, session_keys
from intbmoe.tasks.travel.data import JourneyData, Sessions
from intbmoe.tasks.travel.windows import split_ranges

CHUNK = 4096  # sessions processed together


def floor_scores(
    data: JourneyData, by: str = "time", near: int = NEAR
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yield by floor (N, 1 + negatives) exact scores, the true place's first, and the candidates' categories.

    One visit weighs more than any popularity. ``by`` says how sessions are split.
    """
    candidates = Candidates(data.places, near=near)
    popularity = _visits(data, by)
    weight = float(popularity.max() + 1)
    for number, shard in enumerate(data.shards):
        counter = VisitCounter(shard)
        sessions = np.flatnonzero(_of_split(data, shard, "test", by) & (np.asarray(shard.place) >= 0))
        for first in range(0, len(sessions), CHUNK):
            at = sessions[first : first + CHUNK]
            drawn = candidates.draw(shard.place[at], session_keys(0, 0, number, at))
            popular = popularity[drawn].astype(np.float64)
            scores = {"popularity": popular, "visit counter": counter.count(at, drawn) * weight + popular}
            yield scores, data.places.category[drawn]


def _of_split(data: JourneyData, shard: Sessions, split: str, by: str) -> np.ndarray:
    """Return (S,) which sessions are in the split."""
    edges = np.zeros(len(shard.time) + 1, np.int64)
    first, last = split_ranges(data, shard, split, by)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    return edges.cumsum()[:-1] > 0


def _visits(data: JourneyData, by: str) -> np.ndarray:
    total = np.zeros(len(data.places.cell), np.int64)
    for shard in data.shards:
        place = np.asarray(shard.place)
        known = _of_split(data, shard, "train", by) & (place >= 0)
        total += np.bincount(place[known], minlength=len(total))
    return total


class VisitCounter:
    """How often a user had been to a place before a session, for many of a shard's sessions at once.

    Visits are sorted by (user, place), then by session. A user's visits to a place before session i are then a run,
    from the pair's first visit to the last one before i, and two binary searches find its ends.
    """

    def __init__(self, shard: Sessions) -> None:
        place = np.asarray(shard.place)
        visits = np.flatnonzero(place >= 0)
        self._shard = shard
        self._places = int(place.max(initial=0)) + 1
        pairs = self._pair(visits, place[visits])
        self._pairs, group = np.unique(pairs, return_inverse=True)
        self._order = np.sort(group * len(place) + visits)

    def _pair(self, sessions: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return a number for each (user, place)."""
        users = np.searchsorted(self._shard.offsets, sessions, side="right") - 1
        return users * self._places + places

    def count(self, sessions: np.ndarray, places: np.ndarray) -> np.ndarray:
        """(N,) sessions, (N, C) places → (N, C): visits by the session's user to the place before the session."""
        sought = self._pair(sessions[:, None], np.minimum(places, self._places - 1))
        group = np.minimum(np.searchsorted(self._pairs, sought), len(self._pairs) - 1)
        known = (self._pairs[group] == sought) & (places < self._places)
        group = group * len(self._shard.time)
        runs = np.searchsorted(self._order, group + sessions[:, None]) - np.searchsorted(self._order, group)
        return np.where(known, runs, 0)
