"""Journeys on disk: what ``intbmoe prepare inttravel`` leaves, opened as memory maps.

meta.json                    written last: without it the folder is not finished
places/NAME.npy              the arrays of Places
codes/NAME.npy               the original value of each code of a field, that of code 1 first
shards/00000/time.npy …      sessions of the first shard: offsets, profile, time, and in ``fields`` (7, S) the others;
                             user.npy has the original user ids, which nothing else needs
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.data import JourneyData, Places, Sessions, Sizes
from intbmoe.tasks.travel.folders import read_arrays, read_json

FORMAT = 1
META, WORK = "meta.json", "work"
PLACE_ARRAYS = ("ids", "score", "cell", "category", "region", "cell_offsets", "cell_places")
SHARD_ARRAYS = ("offsets", "profile", "time", "fields")
FIELDS = ("action", "place", "cell", "region", "weather", "mode", "via")
"""The rows of a shard's array ``fields``."""
OPEN_SHARDS = 100
"""Shards that are kept open: each takes four file handles, and a process often has no more than 1,024."""


def shard_folder(path: Path, number: int) -> Path:
    """Where a shard lies."""
    return path / "shards" / f"{number:05d}"


class StoredShards(Sequence[Sessions]):
    """The shards of a folder, opened when they are asked for."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self._open: dict[int, Sessions] = {}

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, number: int) -> Sessions:
        if not 0 <= number < self.number:
            raise IndexError(f"shard {number} of {self.number}")
        shard = self._open.pop(number, None)
        if shard is None:
            arrays = read_arrays(shard_folder(self.path, number), SHARD_ARRAYS, mapped=True)
            shard = Sessions(**dict(zip(FIELDS, arrays.pop("fields"), strict=True)), **arrays)
        self._open[number] = shard  # the one used last is the last of the dict
        if len(self._open) > OPEN_SHARDS:
            del self._open[next(iter(self._open))]
        return shard

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # a pickled memory map would be a copy of the data


def open_journeys(path: str | Path) -> JourneyData:
    """The journeys of a prepared folder."""
    path = Path(path).expanduser()
    command = f"intbmoe prepare inttravel SOURCE {path}"
    meta = read_json(path / META)
    if meta is None:
        if (path / WORK).is_dir():
            raise DataError(f"{path} is not finished, its preparation was stopped: {command} goes on from there")
        wanted = f"data.path must be the folder that {command} makes (see docs/data.md)"
        raise DataError(f"{path} holds no prepared journeys: {wanted}")
    if meta["format"] != FORMAT:
        found = f"{path} has format {meta['format']}, this version of intbmoe reads format {FORMAT}"
        raise DataError(f"{found}: delete the folder and repeat {command}")
    try:
        places = Places(**read_arrays(path / "places", PLACE_ARRAYS, mapped=True))
        shards = StoredShards(path, meta["shards"])
        folders = [shard_folder(path, number) for number in range(len(shards))]
        missing = [folder for folder in folders if not folder.is_dir()]
    except FileNotFoundError as error:
        missing = [Path(error.filename)]
    if missing:
        raise DataError(f"{missing[0]} is missing though {path / META} is there: delete {path} and repeat {command}")
    sizes = Sizes(**meta["sizes"] | {"profile": tuple(meta["sizes"]["profile"])})
    return JourneyData(places, shards, sizes, meta["valid_from"], meta["test_from"])
