"""The places among which a destination must be found: the true one, and others that it is ranked against.

Of 64 others, up to half are in the true place's cell, if it has that many; the rest are in other cells. All are drawn
uniformly, none twice. If they could be anywhere, any place of the right neighbourhood would rank first.

A draw depends only on (seed, epoch, shard, session), by counter-based random numbers, without a loop over sessions.
"""

import numpy as np

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.data import Places

NEGATIVES, NEAR = 64, 32
TOP = (1, 2, 5)
"""Ranks within which the true place is looked for."""


class Candidates:
    def __init__(self, places: Places, negatives: int = NEGATIVES, near: int | None = None) -> None:
        """``near`` of the negatives are neighbours; None for half of them."""
        total = len(places.cell_places)
        if total <= negatives:
            raise DataError(f"there are {total} places: {negatives} negatives and a true one need {negatives + 1}")
        self.places = places
        self.negatives = negatives
        self.near = negatives // 2 if near is None else near
        self._position = np.empty(total, np.int64)  # the index of each place in ``cell_places``
        self._position[places.cell_places] = np.arange(total)

    def draw(self, answers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """(N,) true places, (N,) random keys → (N, 1 + negatives) places, the true one first."""
        total, n = len(self._position), self.negatives
        position = self._position[answers]
        cell = self.places.cell[answers]
        start, stop = self.places.cell_offsets[cell], self.places.cell_offsets[cell + 1]
        near, far = stop - start - 1, total - (stop - start)
        # There are fewer neighbours if the cell has fewer places, and more if there are hardly any others.
        neighbours = np.maximum(np.minimum(self.near, near), n - far)
        bits = _mix(keys[:, None] + np.arange(1, 2 * n + 1, dtype=np.uint64) * _STEP)
        local = start[:, None] + _distinct(bits[:, :n], near, neighbours)
        local += local >= position[:, None]  # skips the true place
        distant = _distinct(bits[:, n:], far, n - neighbours)
        distant += np.where(distant >= start[:, None], (stop - start)[:, None], 0)  # and here its cell
        column = np.arange(n)
        late = np.maximum(column - neighbours[:, None], 0)
        chosen = np.where(column < neighbours[:, None], local, np.take_along_axis(distant, late, 1))
        return np.concatenate([np.asarray(answers)[:, None], self.places.cell_places[chosen]], 1)


def _distinct(bits: np.ndarray, population: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return in row r ``count[r]`` different numbers below ``population[r]``, uniformly; later columns mean nothing.

    By Floyd's method: number j is drawn below population − count + j + 1; if it was drawn before, it is replaced by the
    largest of these, which cannot have been drawn yet.
    """
    chosen = np.empty(bits.shape, np.int64)
    for column in range(bits.shape[1]):
        largest = np.maximum(population - count + column, 0)
        drawn = (bits[:, column] % (largest + 1).astype(np.uint64)).astype(np.int64)
        again = (chosen[:, :column] == drawn[:, None]).any(1)
        chosen[:, column] = np.where(again, largest, drawn)
    return chosen


def session_keys(seed: int, epoch: int, shard: int, sessions: np.ndarray) -> np.ndarray:
    """Return (N,) uint64: one random key for each session of a shard."""
    key = np.zeros(1, np.uint64)
    for number in (seed, epoch, shard):
        key = _mix(key ^ np.uint64(number % 2**64))
    return _mix(key ^ np.asarray(sessions).astype(np.uint64))


_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ divided by the golden ratio, odd: its multiples spread evenly


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits in which each bit affects half of the result (from SplitMix64, Steele et al., 2014)."""
    x = x + _STEP
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
