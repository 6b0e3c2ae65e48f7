"""Journeys on disk: what ``intbmoe prepare inttravel`` writes, opened as memory maps.

meta.json                    written last: without it the folder is not finished
places/NAME.npy              the arrays of Places; longitude, latitude and names only if they were given
codes/NAME.npy               the original value of each code of a field, beginning with code 1
shards/00000/time.npy …      sessions of the first shard: offsets, profile, time, depart, and in ``fields`` (7, S) the
                             others; user.npy has the original user ids, which nothing else needs
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.files import replace_file, replacing_folder, to_json
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.data import JourneyData, Places, Sessions, Sizes

FORMAT = 1
WORK_FORMAT = 5  # of the finished parts of an interrupted preparation
META, NOTE, WORK = "meta.json", "note.json", "work"
PLACE_ARRAYS = ("ids", "score", "cell", "category", "region", "cell_offsets", "cell_places")
NAMES = "names"
LOCATION_ARRAYS = ("longitude", "latitude", NAMES)
"""Also arrays of places, if they were given."""
SHARD_ARRAYS = ("offsets", "profile", "time", "fields")
FIELDS = ("action", "place", "cell", "region", "weather", "mode", "via")
"""The rows of a shard's array ``fields``."""
OPEN_SHARDS = 100
"""Shards kept open: each takes five file handles, and a process often has at most 1,024."""


def shard_folder(path: Path, number: int) -> Path:
    """Return the folder of a shard."""
    return path / "shards" / f"{number:05d}"


def write_folder(folder: Path, arrays: Mapping[str, np.ndarray], note: Any = None) -> None:
    """Write ``arrays`` as NAME.npy, and a note, replacing ``folder``; it appears complete or not at all."""
    with replacing_folder(folder) as unfinished:
        for name, array in arrays.items():
            np.save(unfinished / f"{name}.npy", array)
        if note is not None:
            write_json(unfinished / NOTE, note)


def _map_arrays(folder: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names}


def write_json(file: Path, content: Any) -> None:
    """Write a file that appears complete or not at all."""
    replace_file(file, to_json(content), sync=False)


def read_json(file: Path) -> Any:
    """Return the content, or None if the file does not exist."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None


class StoredShards(Sequence[Sessions]):
    """The shards of a folder, opened when they are needed."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self._opened = lru_cache(OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, number: int) -> Sessions:
        if not 0 <= number < self.number:
            raise IndexError(f"shard {number} of {self.number}")
        return self._opened(number)

    def _open(self, number: int) -> Sessions:
        folder = shard_folder(self.path, number)
        arrays = _map_arrays(folder, SHARD_ARRAYS + (("depart",) if (folder / "depart.npy").exists() else ()))
        return Sessions(**dict(zip(FIELDS, arrays.pop("fields"), strict=True)), **arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredShards, (self.path, self.number)  # a pickled memory map would be a copy of the data


def open_journeys(path: str | Path) -> JourneyData:
    """Open the journeys of a prepared folder."""
    path = Path(path).expanduser()
    command = f"intbmoe prepare inttravel SOURCE {path}"
    meta = read_json(path / META)
    if meta is None:
        if (path / WORK).is_dir():
            raise DataError(f"{path} is not finished, its preparation was stopped: {command} resumes it")
        wanted = f"data.path must be the folder that {command} makes (see docs/data.md)"
        raise DataError(f"{path} holds no prepared journeys: {wanted}")
    if meta["format"] != FORMAT:
        found = f"{path} has format {meta['format']}, but this version of intbmoe reads format {FORMAT}"
        raise DataError(f"{found}: delete the folder and repeat {command}")
    try:
        located = LOCATION_ARRAYS if (path / "places" / f"{NAMES}.npy").exists() else ()
        places = Places(**_map_arrays(path / "places", PLACE_ARRAYS + located))
        shards = StoredShards(path, meta["shards"])
        folders = [shard_folder(path, number) for number in range(len(shards))]
        missing = [folder for folder in folders if not folder.is_dir()]
    except FileNotFoundError as error:
        missing = [Path(error.filename)]
    if missing:
        raise DataError(f"{missing[0]} is missing although {path / META} exists: delete {path} and repeat {command}")
    sizes = Sizes(**meta["sizes"] | {"profile": tuple(meta["sizes"]["profile"])})
    return JourneyData(places, shards, sizes, meta["valid_from"], meta["test_from"])
