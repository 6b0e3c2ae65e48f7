"""IntTravel's raw tables → arrays, out of core: ``intbmoe prepare inttravel SOURCE TARGET``.

    1  places    both tables of places, in memory: there are 7.3 million
    2  reading   user_action and user_profile in chunks, each dealt out to shards by user and kept on disk
    3  codes     all values that a field takes, from the dictionaries of the chunks
    4  sorting   a shard at a time: its rows sorted by user and time, joined into sessions, with the users' profiles
    5  the rest  where the splits begin, and meta.json, which says that all is there

Memory holds the places, the values of the fields, and one chunk or one shard, however many rows there are. Steps are
repeated only as far as their results are missing or the files they came from have changed. What is written does not
depend on where it was interrupted, nor on the sizes of blocks and chunks.
"""

import itertools
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.preparation import Progress
from intbmoe.tasks.travel.data import group_by_cell
from intbmoe.tasks.travel.folders import read_json, write_folder, write_json
from intbmoe.tasks.travel.parse import MISSING, Rows, check, parse
from intbmoe.tasks.travel.places import CATEGORY, CELL, ID, REGION, SCORE, find_places, read_places
from intbmoe.tasks.travel.shards import make_shard
from intbmoe.tasks.travel.spill import Chunk, Layout, Spill, recode, unique
from intbmoe.tasks.travel.splits import split_times
from intbmoe.tasks.travel.store import FORMAT, META, WORK, shard_folder
from intbmoe.tasks.travel.tables import (
    NEEDS_PYARROW,
    POI_BY_CELL,
    POI_INFO,
    PROFILE_COLUMNS,
    TABLES,
    USER_ACTION,
    USER_PROFILE,
    BadRows,
    TableFile,
    find_files,
    read_blocks,
)

ROW_BYTES, GZIP_RATIO = 40, 5
"""A row of user_action is hardly shorter, and gzip hardly packs it closer: there are rather too many shards."""
ACTIONS = Layout(
    plain={
        "user": ("user_id", "<i8"),
        "time": ("timestamp", "<i8"),
        "place": ("poi_id", "<i4"),
        "via": ("via_poi_id", "<i4"),
    },
    coded={
        "action": "action_type",
        "cell": "geographic_id",
        "region": "administrative_region_id",
        "weather": "weather",
        "mode": "travel_mode",
    },
)
PROFILE_FIELDS = tuple(f"profile_{number}" for number in range(1, len(PROFILE_COLUMNS) + 1))
PROFILES = Layout(plain={"user": ("user_id", "<i8")}, coded=dict(zip(PROFILE_FIELDS, PROFILE_COLUMNS, strict=True)))
OF_PLACES = {"cell": CELL, "category": CATEGORY, "region": REGION}


@dataclass(frozen=True)
class Budget:
    """How much is in memory at a time."""

    block_bytes: int = 8 << 20
    """Text that is parsed together."""
    chunk_bytes: int = 128 << 20
    """Text whose rows are dealt out to shards together."""
    shard_rows: int = 8_000_000
    """Rows that are sorted together, at most about so many."""


def prepare(
    source: Path, target: Path, *, skip_bad: bool, progress: Progress, budget: Budget | None = None
) -> Mapping[str, Any]:
    """Make ``target`` and say what is in it. The first malformed row raises ``DataError``, or all are counted."""
    if find_spec("pyarrow") is None:
        raise ModuleNotFoundError(NEEDS_PYARROW)
    source, target = Path(source).expanduser(), Path(target).expanduser()
    files = _find_tables(source)
    names = {file.path.name: file.path.stat().st_size for table in files.values() for file in table}
    meta = read_json(target / META)
    if meta is None:
        meta = _Preparation(files, target, BadRows(skip_bad), progress, budget or Budget()).run({"source": names})
    elif (meta["format"], meta["source"]) != (FORMAT, names):
        what = "from other tables" if meta["format"] == FORMAT else "by another version"
        raise DataError(f"{target} was prepared {what}: delete it, or choose another folder")
    shutil.rmtree(target / WORK, ignore_errors=True)
    return {name: meta[name] for name in ("rows", "sessions", "users", "places", "shards")} | meta["skipped"]


def _find_tables(source: Path) -> dict[str, list[TableFile]]:
    if not source.is_dir():
        raise DataError(f"{source} is not a folder: expected one with IntTravel's tables (see docs/data.md)")
    files = {table.name: find_files(source, table) for table in TABLES}
    for table in (POI_INFO, USER_ACTION, USER_PROFILE):
        if not files[table.name]:
            names = " or ".join(f"{name}.csv" for name in (table.name, *table.other_names))
            raise DataError(f"{source} has no file {names} (.tsv, .txt or .gz will do too): see docs/data.md")
    return files


@dataclass(frozen=True)
class _Preparation:
    files: Mapping[str, list[TableFile]]
    target: Path
    bad: BadRows
    progress: Progress
    budget: Budget

    def run(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """All steps; the content of meta.json, of which ``known`` is a part."""
        work = self.target / WORK
        work.mkdir(parents=True, exist_ok=True)
        poi_files = self.files[POI_INFO.name], self.files[POI_BY_CELL.name]
        places = read_places(work / "places", *poi_files, self.budget.block_bytes, self.bad, self.progress)
        actions, profiles = self._read_rows(places[ID], [[file.stamp() for file in table] for table in poi_files])
        codes = _collect_codes(actions, profiles, places)
        write_folder(self.target / "codes", codes)
        write_folder(self.target / "places", _encode_places(places, codes))
        sizes = _sizes(len(places[ID]), codes)
        del places  # the largest thing in memory, and no longer needed
        shards = self._number_of_shards()
        users, sessions = self._write_shards(shards, actions, profiles, codes)
        valid_from, test_from = split_times(lambda: self._times(shards))
        meta = {
            "format": FORMAT,
            **known,
            "rows": sum(chunk.note["rows"] for chunk in actions),
            "sessions": sessions,
            "users": users,
            "places": sizes["places"],
            "shards": shards,
            "sizes": sizes,
            "valid_from": valid_from,
            "test_from": test_from,
            "skipped": dict(sorted(self.bad.counts.items())),
        }
        write_json(self.target / META, meta)
        return meta

    def _number_of_shards(self) -> int:
        sizes = [file.path.stat().st_size * (GZIP_RATIO if file.zipped else 1) for file in self.files[USER_ACTION.name]]
        return math.ceil(sum(sizes) / ROW_BYTES / self.budget.shard_rows)

    def _read_rows(self, ids: np.ndarray, depends_on: Any) -> tuple[list[Chunk], list[Chunk]]:
        def examine(file: TableFile, rows: Rows, bad: BadRows) -> Rows:
            return _examine_action(ids, file, rows, bad)

        work, shards = self.target / WORK, self._number_of_shards()
        sizes = (self.budget.block_bytes, self.budget.chunk_bytes)
        actions = Spill(work / "actions", ACTIONS, shards, examine, depends_on, *sizes)
        profiles = Spill(work / "profiles", PROFILES, shards, lambda file, rows, bad: rows, None, *sizes)
        read = actions.run(self.files[USER_ACTION.name], self.bad, self.progress)
        if not any(chunk.note["rows"] for chunk in read):
            raise DataError(f"{self.files[USER_ACTION.name][0].path} holds no action that can be used")
        return read, profiles.run(self.files[USER_PROFILE.name], self.bad, self.progress)

    def _write_shards(
        self, shards: int, actions: Sequence[Chunk], profiles: Sequence[Chunk], codes: Mapping[str, np.ndarray]
    ) -> tuple[int, int]:
        """How many users and sessions there are, in all."""
        stamp = [file.stamp() for table in self.files.values() for file in table]
        for stale in set((self.target / "shards").glob("*")) - {shard_folder(self.target, k) for k in range(shards)}:
            shutil.rmtree(stale)  # of a preparation before the tables were changed
        users = sessions = 0
        for number in range(shards):
            folder, receipt = shard_folder(self.target, number), self.target / WORK / f"shard-{number:05d}.json"
            done = read_json(receipt)
            if done is None or done["stamp"] != [stamp, shards] or (done["bad"] and not self.bad.skip):
                arrays, repeated = make_shard(number, actions, profiles, codes)
                bad = BadRows(self.bad.skip)
                if len(repeated):
                    where = self._find_profile(int(repeated[0]))
                    bad.report(f"{USER_PROFILE.name}: repeated user", where, len(repeated))
                write_folder(folder, arrays)
                counts = {"users": len(arrays["user"]), "sessions": len(arrays["time"])}
                done = {"stamp": [stamp, shards], "bad": dict(bad.counts), **counts}
                write_json(receipt, done)
            users, sessions = users + done["users"], sessions + done["sessions"]
            self.bad.counts.update(done["bad"])
            self.progress("sorting (shards)", number + 1, shards)
        return users, sessions

    def _find_profile(self, user: int) -> str:
        """Reads the table again to say which row repeats this user."""
        found = []
        for file in self.files[USER_PROFILE.name]:
            row = file.first_row
            for block in read_blocks(file, self.budget.block_bytes, file.start):
                rows = parse(file, block, row, BadRows(skip=True))
                found += [file.where(at, "user_id") for at in rows.number[rows.columns["user_id"] == user]]
                row += block.text.count(b"\n")
        return f"{found[1]}: user {user} already has a profile in {found[0]}"

    def _times(self, shards: int) -> Iterator[np.ndarray]:
        for number in range(shards):
            yield np.load(shard_folder(self.target, number) / "time.npy")


def _examine_action(ids: np.ndarray, file: TableFile, rows: Rows, bad: BadRows) -> Rows:
    """Places become rows of Places, −1 for none."""
    rows = check(file, rows, "timestamp", rows.columns["timestamp"] < 0, "negative timestamp", "is negative", bad)
    for field in ("poi_id", "via_poi_id"):
        unknown = (rows.columns[field] != MISSING) & (find_places(ids, rows.columns[field]) < 0)
        rows = check(file, rows, field, unknown, "unknown place", f"is not a place of {POI_INFO.name}", bad)
    found = {field: find_places(ids, rows.columns[field]) for field in ("poi_id", "via_poi_id")}
    return Rows(rows.number, rows.columns | found)


def _collect_codes(
    actions: Sequence[Chunk], profiles: Sequence[Chunk], places: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Field → all its values, ascending: the first has code 1."""
    own = {name: unique(places[column]) for name, column in OF_PLACES.items()}
    codes = {"category": own.pop("category")}
    for chunks, layout in ((actions, ACTIONS), (profiles, PROFILES)):
        for name in layout.coded:
            parts = (chunk.values(name) for chunk in chunks)
            codes[name] = _union(itertools.chain([own[name]] if name in own else [], parts))
    return codes


def _union(parts: Iterable[np.ndarray]) -> np.ndarray:
    """All values, ascending. Parts wait until they are as many as what is known, so that that is sorted rarely."""
    known, waiting, number = np.empty(0, np.int64), [], 0
    for part in parts:
        waiting.append(part)
        number += len(part)
        if number > len(known):
            known, waiting, number = np.unique(np.concatenate([known, *waiting])), [], 0
    return np.unique(np.concatenate([known, *waiting]))


def _encode_places(places: Mapping[str, np.ndarray], codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    coded = {name: recode(places[column], codes[name]) for name, column in OF_PLACES.items()}
    cell_offsets, cell_places = group_by_cell(coded["cell"], len(codes["cell"]) + 1)
    return {
        "ids": places[ID],
        "score": places[SCORE],
        **coded,
        "cell_offsets": cell_offsets,
        "cell_places": cell_places,
    }


def _sizes(places: int, codes: Mapping[str, np.ndarray]) -> dict[str, Any]:
    number = {name: len(values) + 1 for name, values in codes.items()}
    return {
        "places": places,
        "cells": number["cell"],
        "regions": number["region"],
        "categories": number["category"],
        "weathers": number["weather"],
        "modes": number["mode"],
        "actions": number["action"],
        "profile": [number[name] for name in PROFILE_FIELDS],
    }
