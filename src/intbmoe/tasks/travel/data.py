"""Journeys as arrays: what IntTravel's tables become, and what the embedded generator makes.

Codes are 1…n−1, and 0 means missing or unknown. In a session, ``cell``, ``region``, ``weather`` and ``time`` are the
scenario (where and when the user is: known before), ``place`` is the intention (the answer), and ``mode``, ``action``
and ``via`` are feedback (known after).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

PROFILE_FEATURES = 6
HOUR = 3_600_000  # milliseconds
LATEST_DEPARTURE = 48  # hours: "when" does not distinguish later departures
BINS = 1 << 20
TRAIN_TENTHS, KNOWN_TENTHS = 8, 9  # tenths of all sessions for training, and for training and validation together


@dataclass(frozen=True)
class Places:
    """P places in C cells; row p describes place p."""

    ids: np.ndarray  # (P,) int64: the original poi_id, ascending
    score: np.ndarray  # (P,) float32: normalized_score
    cell: np.ndarray  # (P,) int32: code of geographic_id
    category: np.ndarray  # (P,) int32 code
    region: np.ndarray  # (P,) int32: code of administrative_region_id
    cell_offsets: np.ndarray  # (C + 1,) int64: cell c has ``cell_places[cell_offsets[c]:cell_offsets[c + 1]]``
    cell_places: np.ndarray  # (P,) int32 rows, ascending within a cell
    longitude: np.ndarray | None = None  # (P,) float64, degrees, NaN if unknown; None: unknown for all
    latitude: np.ndarray | None = None
    names: np.ndarray | None = None  # (P,) UTF-8 in numpy's bytes, empty for none; None: no place has a name


@dataclass(frozen=True)
class Sessions:
    """One shard: S sessions of U users, sorted by (user, time); the arrays may be memory maps."""

    offsets: np.ndarray  # (U + 1,) int64: the sessions of user u are ``offsets[u]:offsets[u + 1]``
    profile: np.ndarray  # (U, 6) int32 codes
    time: np.ndarray  # (S,) int64: milliseconds since 1970 UTC
    action: np.ndarray  # (S,) int32 code, like ``cell``, ``region``, ``weather`` and ``mode``
    place: np.ndarray  # (S,) int32: row of Places, −1 for none
    cell: np.ndarray
    region: np.ndarray
    weather: np.ndarray
    mode: np.ndarray
    via: np.ndarray  # (S,) int32: row of Places, −1 for none
    depart: np.ndarray | None = None  # (S,) int32: ``find_departures``; None in folders prepared before it existed
    clock: np.ndarray | None = None  # (S,) int64: milliseconds that the user's clock is ahead of UTC; None: all alike


@dataclass(frozen=True)
class Sizes:
    """How many codes each field has, including 0; for places, how many there are."""

    places: int
    cells: int
    regions: int
    categories: int
    weathers: int
    modes: int
    actions: int
    profile: tuple[int, ...]  # six


@dataclass(frozen=True)
class JourneyData:
    places: Places
    shards: Sequence[Sessions]
    sizes: Sizes
    valid_from: int  # milliseconds: earlier sessions are for training
    test_from: int  # milliseconds: sessions from here on are the test split, those in between the validation split


def split_times(parts: Callable[[], Iterable[np.ndarray]]) -> tuple[int, int]:
    """Return ``valid_from`` and ``test_from``: 80, 10 and 10 % of the sessions whose times ``parts`` gives.

    The split is by time, so that no model is trained on what comes after a test. Each is the first edge of a histogram
    with at least that share of the sessions before it. The bins divide the whole range by a million (7 seconds for
    three months): the parts are read one after another, twice, and never sorted.
    """
    ranges = [(int(part.min()), int(part.max())) for part in parts() if len(part)]
    first = min(low for low, _ in ranges)
    width = (max(high for _, high in ranges) - first) // BINS + 1
    counts = np.zeros(BINS, np.int64)
    for part in parts():
        counts += np.bincount((part - first) // width, minlength=BINS)
    before = np.concatenate([[0], np.cumsum(counts)])
    edges = np.searchsorted(10 * before, before[-1] * np.array([TRAIN_TENTHS, KNOWN_TENTHS]))
    return first + width * int(edges[0]), first + width * int(edges[1])


def find_departures(rows: Mapping[str, np.ndarray], first: np.ndarray, sets_out: np.ndarray) -> np.ndarray:
    """Return (S,) 1 + the hours from each session's start until the user sets out; 49 for two days or more.

    ``rows`` (N,) are sorted by user and time, ``first`` (S,) are those that begin a session and ``sets_out`` (N,) those
    in which navigation starts. The first such row of the session counts, otherwise the user's next one to the same
    place from the same cell. 49 also means never, and 0 a session without a place.
    """
    user, place, cell, time = (rows[name] for name in ("user", "place", "cell", "time"))
    number = len(user)
    if not number:
        return np.zeros(0, np.int32)
    own = _next_true(sets_out)[first]
    own = np.where(own < np.append(first[1:], number), own, number)
    order = np.lexsort((cell, place, user))  # stable: by time within a group
    changes = [column[order][1:] != column[order][:-1] for column in (user, place, cell)]
    group = np.append(0, np.cumsum(np.logical_or.reduce(changes)))
    later = _next_true(sets_out[order])
    within = later < number
    within[within] = group[later[within]] == group[within]
    elsewhere = np.empty(number, np.int64)
    elsewhere[order] = np.where(within, order[np.minimum(later, number - 1)], number)
    found = np.where(own < number, own, elsewhere[first])
    hours = (time[np.minimum(found, number - 1)] - time[first]) // HOUR
    code = 1 + np.where(found < number, np.minimum(hours, LATEST_DEPARTURE), LATEST_DEPARTURE)
    return np.where(place[first] >= 0, code, 0).astype(np.int32)


def _next_true(flags: np.ndarray) -> np.ndarray:
    """Return (N,) the index of the next True, at each position or after it; N if there is none."""
    at = np.where(flags, np.arange(len(flags)), len(flags))
    return np.minimum.accumulate(at[::-1])[::-1]


def group_by_cell(cell: np.ndarray, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``cell_offsets`` and ``cell_places`` of places in these cells (codes below ``cells``)."""
    offsets = np.zeros(cells + 1, np.int64)
    np.cumsum(np.bincount(cell, minlength=cells), out=offsets[1:])
    return offsets, np.argsort(cell, kind="stable").astype(np.int32)


def bare_places(
    cell: np.ndarray, cells: int, category: np.ndarray | None = None, region: np.ndarray | None = None
) -> Places:
    """Return places 0 to P − 1 in these cells (codes below ``cells``), without scores; what is not given is unknown."""
    unknown = np.zeros(len(cell), np.int32)
    return Places(
        np.arange(len(cell), dtype=np.int64),
        np.full(len(cell), np.nan, np.float32),
        cell,
        unknown if category is None else category,
        unknown if region is None else region,
        *group_by_cell(cell, cells),
    )
