"""Windows of users' sessions: which ones a split has.

Finding them reads the times of all sessions, a fifth of the data. For prepared journeys this is done once for all
processes on a machine: the windows are kept in the cache folder, as files that are mapped into memory.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.files import to_json
from intbmoe.tasks.arrays import map_array
from intbmoe.tasks.base import SPLITS
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import cache_folder, cached_folder, fingerprint
from intbmoe.tasks.travel.data import JourneyData, Sessions
from intbmoe.tasks.travel.store import META, StoredShards

ALL, ENDS = "windows.bin", "ends.npy"
VERSION = 2  # of the files in the cache folder
WINDOW = np.dtype([("user", np.int32), ("stop", np.int64), ("length", np.int16), ("targets", np.int16)])
"""``stop`` is the session after the window's last, ``length`` the number of sessions, and ``targets`` how many of them,
at the end, are in the split's range. 16 bytes, so that the windows of hundreds of millions of users fit."""
Windows = np.recarray  # (W,) of WINDOW, of one shard


def split_ranges(data: JourneyData, shard: Sessions, split: str, by: str = "time") -> tuple[np.ndarray, np.ndarray]:
    """Return (U,) the first session of each user in a split, and the one after the last."""
    offsets = np.asarray(shard.offsets)
    oldest, newest = offsets[:-1], offsets[1:]

    def edge(number: int) -> np.ndarray:
        if number in (0, len(SPLITS)):
            return newest if number else oldest
        if by == "newest":
            return np.maximum(newest - len(SPLITS) + number, oldest)
        return oldest + _count_before(shard, (data.valid_from, data.test_from)[number - 1])

    number = SPLITS.index(split)
    return edge(number), edge(number + 1)


def find_windows(shard: Sessions, first: np.ndarray, last: np.ndarray, sessions: int, targets: int) -> Windows:
    """Return windows of at most ``sessions``; up to ``targets`` at their end are in ``first`` (U,) to ``last``."""
    oldest = np.asarray(shard.offsets)[:-1]
    number = -(-(last - first) // targets)
    user = np.repeat(np.arange(len(number), dtype=np.int32), number)
    back = np.arange(len(user)) - np.repeat(np.cumsum(number) - number, number)
    stop = last[user] - back * targets
    length = np.minimum(stop - oldest[user], sessions)
    return np.rec.fromarrays([user, stop, length, np.minimum(stop - first[user], targets)], WINDOW)


def _count_before(shard: Sessions, time: int) -> np.ndarray:
    """Return (U,) how many sessions of each user are earlier than ``time``."""
    total = np.zeros(len(shard.time) + 1, np.int64)
    np.cumsum(np.asarray(shard.time) < time, out=total[1:])
    return total[shard.offsets[1:]] - total[shard.offsets[:-1]]


def windows_of(
    data: JourneyData, split: str, by: str, sessions: int, targets: int
) -> tuple[Sequence[Windows], np.ndarray]:
    """Return the windows of each shard, and (shards,) how many there are up to its end.

    ``sessions`` and ``targets`` are those of ``find_windows``.
    """
    found = (find_windows(shard, *split_ranges(data, shard, split, by), sessions, targets) for shard in data.shards)
    if isinstance(data.shards, StoredShards):
        windows = StoredWindows(_keep(data.shards.path, [split, by, sessions, targets], found))
        return windows, windows.ends
    windows = list(found)
    return windows, np.cumsum([len(one) for one in windows])


class StoredWindows(Sequence[Windows]):
    """Windows in the cache folder; pages that are not read are not loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends = np.load(folder / ENDS)
        self._all = map_array(folder / ALL, WINDOW).view(np.recarray)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Windows:
        return self._all[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])]

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredWindows, (self.folder,)  # a pickled memory map would be a copy of the data


def _keep(prepared: Path, chosen: list[Any], found: Iterator[Windows]) -> Path:
    """Return the folder of these windows; they are searched for only if it does not exist yet."""
    meta = prepared / META
    key = fingerprint(to_json([VERSION, str(prepared.resolve()), meta.stat().st_mtime_ns, chosen]), meta.read_bytes())
    try:
        return cached_folder("journeys", key, lambda beside: _write(beside, found), Path.is_dir)
    except OSError as error:
        raise DataError(
            f"the windows of {prepared} cannot be kept in {cache_folder()}: {error}; set INTBMOE_CACHE to another"
        ) from error


def _write(folder: Path, found: Iterator[Windows]) -> None:
    """Write shard after shard, so that only one at a time is in memory."""
    counts = []
    with open(folder / ALL, "wb") as file:
        for windows in found:
            file.write(windows.tobytes())
            counts.append(len(windows))
    np.save(folder / ENDS, np.cumsum(counts, dtype=np.int64))
