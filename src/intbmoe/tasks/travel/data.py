"""Journeys as arrays: what the tables of IntTravel become, and what the embedded generator makes.

Codes are 1…n−1, and 0 means missing or unknown. Of a session, ``cell``, ``region``, ``weather`` and ``time`` are the
scenario (where and when the user is: known before), ``place`` is the intention (the answer), and ``mode``, ``action``
and ``via`` are feedback (known after).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PROFILE_FEATURES = 6


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


@dataclass(frozen=True)
class Sizes:
    """How many codes each field has, 0 included; of places, how many there are."""

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
    valid_from: int  # milliseconds: sessions before it are for training
    test_from: int  # milliseconds: sessions from here on are the test split, those in between validation


def group_by_cell(cell: np.ndarray, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """``cell_offsets`` and ``cell_places`` of places in these cells (codes below ``cells``)."""
    offsets = np.zeros(cells + 1, np.int64)
    np.cumsum(np.bincount(cell, minlength=cells), out=offsets[1:])
    return offsets, np.argsort(cell, kind="stable").astype(np.int32)
