"""Journeys in the form that the training loop reads: padded windows of a user's sessions, with candidates for targets.

Letters: ``B`` windows, ``S`` sessions in the longest window, ``C`` candidates.

The split is by time, or each user's newest session is the test and the one before it validation. A session's
destination is a target of one split, exactly once; the sessions before it are its history, whichever split they are in.

    train        windows that do not overlap, from a user's last training session backwards; all sessions are targets
    valid, test  at most the last S/2 sessions of a window are targets, each with S/2 sessions, or all, before it

A batch has ``profile`` (B, 6), ``scenario`` (B, S, 6), ``place`` (B, S, 5), ``feedback`` (B, S, 2), ``via`` (B, S, 5)
and ``candidates`` (B, S, C, 5), codes in int32 as described in ``models/travel.py``; ``mask`` (B, S), true where there
is a session, and ``targets`` (B, S), true where its destination is to be predicted; the true one is candidate 0. With
the task "when", ``depart`` (B, S) has the codes of ``find_departures``.
"""

from collections.abc import Sequence

import numpy as np
import torch

from intbmoe.tasks.base import Batch
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.candidates import NEAR, Candidates, session_keys
from intbmoe.tasks.travel.data import HOUR, JourneyData, Places, Sessions
from intbmoe.tasks.travel.windows import Windows, windows_of

SCORE_CODES = 32
MINUTE = 60_000  # milliseconds


def place_codes(places: Places) -> np.ndarray:
    """Return (1 + P, 5) int32, place p in row p + 1; the code of a score is its group, of 32 equally large groups."""
    known = places.score[~np.isnan(places.score)]
    edges = np.unique(np.quantile(known, np.arange(1, SCORE_CODES) / SCORE_CODES)) if len(known) else known
    score = np.where(np.isnan(places.score), 0, 1 + np.searchsorted(edges, places.score, side="right"))
    codes = np.zeros((1 + len(places.cell), 5), np.int32)
    columns = (np.arange(1, len(codes)), places.cell, places.category, places.region, score)
    for column, values in enumerate(columns):
        codes[1:, column] = values
    return codes


def time_codes(
    time: np.ndarray, before: np.ndarray, clock: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes of hour, weekday and gap, from times of sessions and of those before them (−1 for none)."""
    hours = (time + clock) // HOUR
    weekday = (hours // 24 + 3) % 7  # 1 January 1970 was a Thursday, day 3 of a week from Monday
    # 1 + ⌊log₂(1 + minutes)⌋: minutes matter after an hour, days after a week.
    gap = 1 + np.log2(1 + (time - before) / MINUTE).astype(np.int64)
    return 1 + hours % 24, 1 + weekday, np.where(before >= 0, gap, 0)


class JourneyReader:
    """Reads windows of a data set into batches; holds what all splits share."""

    def __init__(
        self,
        data: JourneyData,
        sessions: int,
        utc_offset: float = 0.0,
        *,
        departures: bool = False,
        by: str = "time",
        near: int = NEAR,
    ) -> None:
        """``departures``: whether batches have ``depart``. ``by``: how sessions are split, by time or newest."""
        if departures and data.shards[0].depart is None:
            raise DataError(
                "the prepared journeys do not say when users set out: delete them and repeat intbmoe prepare inttravel"
            )
        self.data, self.sessions, self.departures, self.by = data, sessions, departures, by
        self.clock = round(utc_offset * HOUR)
        self.candidates = Candidates(data.places, near=near)
        self.codes = place_codes(data.places)

    def new_arrays(self, size: int) -> dict[str, np.ndarray]:
        shape = (size, self.sessions)
        widths = {"scenario": (6,), "place": (5,), "feedback": (2,), "via": (5,)}
        widths["candidates"] = (1 + self.candidates.negatives, 5)
        codes = {name: np.zeros((*shape, *width), np.int32) for name, width in widths.items()}
        flags = {name: np.zeros(shape, bool) for name in ("mask", "targets")}
        if self.departures:
            codes["depart"] = np.zeros(shape, np.int32)
        return {"profile": np.zeros((size, 6), np.int32), **codes, **flags}

    def fill(
        self, arrays: dict[str, np.ndarray], rows: np.ndarray, number: int, windows: Windows, epoch: int, seed: int
    ) -> None:
        """Write these windows of shard ``number`` into ``rows`` of the arrays."""
        shard = self.data.shards[number]
        arrays["profile"][rows] = shard.profile[windows.user]
        length = windows.length.astype(np.int64)
        row, column = np.nonzero(np.arange(self.sessions) < length[:, None])
        at = (windows.stop - length)[row] + column
        where = rows[row], column
        arrays["mask"][where] = True
        arrays["scenario"][where] = self._scenario(shard, at, shard.offsets[windows.user[row]])
        arrays["place"][where] = self.codes[shard.place[at] + 1]
        arrays["feedback"][where] = np.stack([shard.mode[at], shard.action[at]], 1)
        arrays["via"][where] = self.codes[shard.via[at] + 1]
        target = (column >= (length - windows.targets)[row]) & (shard.place[at] >= 0)
        arrays["targets"][where] = target
        if self.departures:
            arrays["depart"][where] = shard.depart[at]
        at = at[target]
        drawn = self.candidates.draw(shard.place[at], session_keys(seed, epoch, number, at))
        arrays["candidates"][rows[row[target]], column[target]] = self.codes[drawn + 1]

    def _scenario(self, shard: Sessions, at: np.ndarray, oldest: np.ndarray) -> np.ndarray:
        """Return (N, 6) codes of what is known before the user chooses; ``oldest`` is the user's first session."""
        before = np.where(at > oldest, shard.time[np.maximum(at - 1, oldest)], -1)
        times = time_codes(shard.time[at], before, self.clock if shard.clock is None else shard.clock[at])
        return np.stack([shard.cell[at], shard.region[at], shard.weather[at], *times], 1)


class JourneyExamples:
    """One split, whose examples are windows; with ``at_most``, only that many, evenly spread over all."""

    def __init__(self, reader: JourneyReader, split: str, at_most: int | None = None) -> None:
        targets = reader.sessions if split == "train" else max(1, reader.sessions // 2)
        self.reader = reader
        self.varied = split == "train"
        self.windows, self._ends = windows_of(reader.data, split, reader.by, reader.sessions, targets)
        self.total = int(self._ends[-1]) if len(self._ends) else 0
        self._length = self.total if at_most is None else min(at_most, self.total)

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return the windows at ``indices``; negatives change with the epoch in training, but not in evaluation."""
        seed, epoch = (seed, epoch) if self.varied else (0, 0)
        arrays = self.reader.new_arrays(len(indices))
        spread = np.asarray(indices, dtype=np.int64) * self.total // max(1, self._length)
        shards = np.searchsorted(self._ends, spread, side="right")
        for number in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == number)
            inside = spread[rows] - (self._ends[number] - len(self.windows[number]))
            self.reader.fill(arrays, rows, number, self.windows[number][inside], epoch, seed)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
