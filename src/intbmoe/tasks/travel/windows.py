"""Windows of users' sessions: which ones a split has.

Finding them reads the times of all sessions, a fifth of the data. Of prepared journeys that is done once for all
processes of a machine: the windows are kept in the cache folder, as files that are mapped into memory.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.files import replacing_folder, to_json
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import cache_folder, fingerprint
from intbmoe.tasks.travel.data import JourneyData, Sessions
from intbmoe.tasks.travel.store import META, StoredShards

SPLITS = ("train", "valid", "test")
VERSION = 1  # of the files in the cache folder
TYPES = {"user": np.int32, "stop": np.int64, "length": np.int16, "targets": np.int16}
ENDS = "ends.npy"


@dataclass(frozen=True)
class Windows:
    """Windows of one shard, as arrays: 16 bytes each, so that hundreds of millions of users fit."""

    user: np.ndarray  # (W,) int32
    stop: np.ndarray  # (W,) int64: the session after the last
    length: np.ndarray  # (W,) int16 sessions
    targets: np.ndarray  # (W,) int16: how many of them, the last ones, are in the split's range

    def __len__(self) -> int:
        return len(self.stop)

    def take(self, indices: np.ndarray) -> "Windows":
        return Windows(self.user[indices], self.stop[indices], self.length[indices], self.targets[indices])


def split_ranges(data: JourneyData, shard: Sessions, split: str, by: str = "time") -> tuple[np.ndarray, np.ndarray]:
    """(U,) the first session of each user in a split, and the one after the last."""
    offsets = np.asarray(shard.offsets)
    oldest, newest = offsets[:-1], offsets[1:]
    if by == "newest":
        edges = {"train": oldest, "valid": np.maximum(newest - 2, oldest), "test": np.maximum(newest - 1, oldest)}
        ends = {"train": edges["valid"], "valid": edges["test"], "test": newest}
        return edges[split], ends[split]
    starts = {"train": None, "valid": data.valid_from, "test": data.test_from, "end": None}
    following = dict(zip(SPLITS, ("valid", "test", "end"), strict=True))
    start, end = starts[split], starts[following[split]]
    first = oldest if start is None else oldest + _count_before(shard, start)
    return first, newest if end is None else oldest + _count_before(shard, end)


def find_windows(shard: Sessions, first: np.ndarray, last: np.ndarray, sessions: int, targets: int) -> Windows:
    """Windows of at most ``sessions``, whose last ``targets`` or fewer are from ``first`` (U,) to before ``last``."""
    oldest = np.asarray(shard.offsets)[:-1]
    number = -(-(last - first) // targets)
    user = np.repeat(np.arange(len(number), dtype=np.int32), number)
    back = np.arange(len(user)) - np.repeat(np.cumsum(number) - number, number)
    stop = last[user] - back * targets
    length = np.minimum(stop - oldest[user], sessions)
    aimed = np.minimum(stop - first[user], targets)
    return Windows(user, stop, length.astype(np.int16), aimed.astype(np.int16))


def _count_before(shard: Sessions, time: int) -> np.ndarray:
    """(U,) how many sessions of each user are earlier than ``time``."""
    total = np.zeros(len(shard.time) + 1, np.int64)
    np.cumsum(np.asarray(shard.time) < time, out=total[1:])
    return total[shard.offsets[1:]] - total[shard.offsets[:-1]]


def windows_of(
    data: JourneyData, split: str, by: str, sessions: int, targets: int
) -> tuple[Sequence[Windows], np.ndarray]:
    """The windows of each shard, and (shards,) how many there are up to its end. ``sessions`` and ``targets`` are of
    ``find_windows``."""
    found = (find_windows(shard, *split_ranges(data, shard, split, by), sessions, targets) for shard in data.shards)
    if isinstance(data.shards, StoredShards):
        windows = StoredWindows(_keep(data.shards.path, [split, by, sessions, targets], found))
        return windows, windows.ends
    windows = list(found)
    return windows, np.cumsum([len(one) for one in windows])


class StoredWindows(Sequence[Windows]):
    """Windows in the cache folder; pages of them that nobody reads are not loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends = np.load(folder / ENDS)
        self._arrays = {name: _map(folder / f"{name}.bin", kind) for name, kind in TYPES.items()}

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Windows:
        start, end = int(self.ends[number - 1]) if number else 0, int(self.ends[number])
        return Windows(**{name: array[start:end] for name, array in self._arrays.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredWindows, (self.folder,)  # a pickled memory map would be a copy of the data


def _keep(prepared: Path, chosen: list[Any], found: Iterator[Windows]) -> Path:
    """The folder of these windows; they are found only if it is not there yet."""
    meta = prepared / META
    key = fingerprint(to_json([VERSION, str(prepared.resolve()), meta.stat().st_mtime_ns, chosen]), meta.read_bytes())
    folder = cache_folder() / "journeys" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "wb") as lock:
            with suppress(OSError):  # where the file system has no locks, each process finds them for itself
                fcntl.flock(lock, fcntl.LOCK_EX)  # the first one does, the others wait
            if not folder.is_dir():
                with replacing_folder(folder) as beside:
                    _write(beside, found)
    except OSError as error:
        where = os.fspath(cache_folder())
        raise DataError(
            f"the windows of {prepared} cannot be kept in {where}: {error}; set INTBMOE_CACHE to another folder"
        ) from error
    return folder


def _write(folder: Path, found: Iterator[Windows]) -> None:
    """Shard after shard, so that one at a time is in memory."""
    counts = []
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in TYPES}
        for windows in found:
            for name, kind in TYPES.items():
                files[name].write(getattr(windows, name).astype(kind, copy=False).tobytes())
            counts.append(len(windows))
    np.save(folder / ENDS, np.cumsum(counts, dtype=np.int64))


def _map(path: Path, kind: type) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, kind)
    return np.memmap(path, dtype=kind, mode="r")
