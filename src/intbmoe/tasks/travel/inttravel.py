"""IntTravel's raw tables → arrays, out of core: ``intbmoe prepare inttravel SOURCE TARGET``.

    1  places    both tables of places become one
    2  reading   user_action and user_profile, one chunk at a time: parsed by DuckDB, checked, kept by shard
    3  codes     all values of each field
    4  sorting   one shard at a time: its rows sorted by user and time, joined into sessions, with the users' profiles
    5  the rest  where the splits begin, and meta.json, which says that everything is there

Users are assigned to shards by their number. Several workers can do chunks and shards. Steps are repeated only if their
results are missing or their source files have changed. The result does not depend on where it was interrupted, on who
did it, or on the budget, except for the size of shards.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.preparation import locked
from intbmoe.tasks.travel import store, tables
from intbmoe.tasks.travel.chunks import Chunk, Unpacker, divide
from intbmoe.tasks.travel.data import group_by_cell, split_times
from intbmoe.tasks.travel.places import load_places
from intbmoe.tasks.travel.rows import MISSING, Budget
from intbmoe.tasks.travel.shards import encode, make_shard
from intbmoe.tasks.travel.spill import CODED, Spill
from intbmoe.tasks.travel.tables import BadRows, TableFile, is_zipped
from intbmoe.tasks.workers import ALONE, Progress, Work, Workers

ROW_BYTES, GZIP_RATIO = 40, 5
"""Bounds on a row of user_action and on gzip's compression, chosen so that there are rather too many shards."""
SIZES = {"places": "places", "category": "categories"}
SIZES |= {name: f"{name}s" for name in ("cell", "region", "weather", "mode", "action")}
OF_PLACES = {"cell": "geographic_id", "category": "category_id", "region": "administrative_region_id"}


def prepare(
    source: Path,
    target: Path,
    *,
    skip_bad: bool,
    progress: Progress,
    workers: Workers = ALONE,
    budget: Budget | None = None,
) -> Mapping[str, Any]:
    """Make ``target`` and return what is in it; the first malformed row raises ``DataError``, or all are counted."""
    source, target = Path(source).expanduser(), Path(target).expanduser()
    files = _find_tables(source)
    names = {file.path.name: file.path.stat().st_size for table in files.values() for file in table}
    meta = store.read_json(target / store.META)
    if meta is None:
        (target / store.WORK).mkdir(parents=True, exist_ok=True)
        with locked(target / store.WORK, target):
            meta = _Preparation(files, target, BadRows(skip_bad), progress, workers, budget or Budget()).make(names)
    elif (meta["format"], meta["source"]) != (store.FORMAT, names):
        what = "from other tables" if meta["format"] == store.FORMAT else "by another version"
        raise DataError(f"{target} was prepared {what}: delete it, or choose another folder")
    shutil.rmtree(target / store.WORK, ignore_errors=True)
    return {name: meta[name] for name in ("rows", "sessions", "users", "places", "shards")} | meta["skipped"]


def _find_tables(source: Path) -> dict[str, list[TableFile]]:
    if not source.is_dir():
        raise DataError(f"{source} is not a folder: expected one with IntTravel's tables (see docs/data.md)")
    files = {table.name: tables.find_files(source, table) for table in tables.TABLES}
    for table in (tables.POI_INFO, tables.USER_ACTION, tables.USER_PROFILE):
        if not files[table.name]:
            names = " or ".join(f"{name}.csv" for name in (table.name, *table.other_names))
            raise DataError(f"{source} has no file {names} (.tsv, .txt or .gz is fine too): see docs/data.md")
    return files


@dataclass(frozen=True)
class _Preparation:
    files: Mapping[str, list[TableFile]]
    target: Path
    bad: BadRows
    progress: Progress
    workers: Workers
    budget: Budget

    @property
    def work(self) -> Path:
        return self.target / store.WORK

    def make(self, names: Mapping[str, int]) -> dict[str, Any]:
        """Run all steps and return the content of meta.json, with the ``names`` and sizes of the source files."""
        temporary = self.work / "temporary"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        action_files = self.files[tables.USER_ACTION.name]
        sizes = [file.path.stat().st_size * (GZIP_RATIO if is_zipped(file.path) else 1) for file in action_files]
        shards = math.ceil(sum(sizes) / ROW_BYTES / self.budget.shard_rows)
        chunks = self._divide()
        poi = [chunks[table.name] for table in (tables.POI_INFO, tables.POI_BY_CELL, tables.POI_LOCATION)]
        places = load_places(self.work / "places", temporary, self.budget, poi, self.bad, self.progress)
        known = [chunk.file.stamp() for table in poi for chunk in table]
        actions, rows = self._read(tables.USER_ACTION.name, chunks[tables.USER_ACTION.name], shards, known)
        if not rows:
            raise DataError(f"{action_files[0].path} holds no action that can be used")
        profiles, _ = self._read(tables.USER_PROFILE.name, chunks[tables.USER_PROFILE.name], shards, None)
        codes = _collect_codes(places, actions, profiles)
        store.write_folder(self.target / "codes", codes)
        store.write_folder(self.target / "places", _encode_places(places, codes))
        number_of = {"places": len(places["poi_id"])} | {name: len(values) + 1 for name, values in codes.items()}
        del places  # the largest thing in memory, and no longer needed
        users, sessions = self._sort(shards, actions, profiles)
        valid_from, test_from = split_times(
            lambda: (np.load(store.shard_folder(self.target, number) / "time.npy") for number in range(shards))
        )
        meta = {
            "format": store.FORMAT,
            "source": names,
            "rows": rows,
            "sessions": sessions,
            "users": users,
            "shards": shards,
            "places": number_of["places"],
            "valid_from": valid_from,
            "test_from": test_from,
            "sizes": {
                **{many: number_of[one] for one, many in SIZES.items()},
                "profile": [number_of[name] for name in CODED[tables.USER_PROFILE.name]],
            },
            "skipped": dict(sorted(self.bad.counts.items())),
        }
        store.write_json(self.target / store.META, meta)
        return meta

    def _divide(self) -> dict[str, list[Chunk]]:
        """Return the chunks of each table; gzipped files are unpacked first."""
        for folder in (self.work / "unpacked", self.work / "counted"):
            folder.mkdir(exist_ok=True)
        zipped = [file for files in self.files.values() for file in files if is_zipped(file.path)]
        unpacked = self.workers.run("unpacking (files)", Unpacker(self.work / "unpacked"), zipped, self.progress)
        text_of = dict(zip(zipped, unpacked, strict=True))
        chunks: dict[str, list[Chunk]] = {}
        for table, files in self.files.items():
            chunks[table] = []
            for file in files:
                counted, file = self.work / "counted" / f"{file.path.name}.json", text_of.get(file, file)
                chunks[table] += divide(file, self.budget.chunk_bytes, counted, self.workers, self.progress)
        return chunks

    def _read(self, table: str, chunks: Sequence[Chunk], shards: int, depends_on: Any) -> tuple[list[Path], int]:
        """Return the folders of a table's chunks, and how many rows they have."""
        own, ids = self.budget.shared_by(self.workers.share), self.work / "places" / "poi_id.npy"
        spill = Spill(self.work / table, self.work / "temporary", own, shards, ids, depends_on, self.bad.skip)
        found = self._run(f"reading {table} (chunks)", spill, chunks)
        return [one["folder"] for one in found], sum(one["rows"] for one in found)

    def _run(self, stage: str, work: Work, parts: Sequence[Any]) -> list[dict[str, Any]]:
        found = self.workers.run(stage, work, parts, self.progress)
        for one in found:
            self.bad.counts.update(one["bad"])
        return found

    def _sort(self, shards: int, actions: Sequence[Path], profiles: Sequence[Path]) -> tuple[int, int]:
        """Make all shards; return the numbers of users and sessions in them."""
        wanted = {store.shard_folder(self.target, number) for number in range(shards)}
        for stale in set((self.target / "shards").glob("*")) - wanted:
            shutil.rmtree(stale)  # from a preparation before the tables were changed
        stamp = [store.WORK_FORMAT, [file.stamp() for table in self.files.values() for file in table], shards]
        maker = ShardMaker(
            self.target, stamp, self.bad.skip, actions, profiles, self.files[tables.USER_PROFILE.name], shards
        )
        made = self._run("sorting (shards)", maker, range(shards))
        return sum(one["users"] for one in made), sum(one["sessions"] for one in made)


def _collect_codes(
    places: Mapping[str, np.ndarray], actions: Sequence[Path], profiles: Sequence[Path]
) -> dict[str, np.ndarray]:
    """Return all values of each field, ascending: the first has code 1."""
    parts = {name: [np.unique(places[column][places[column] != MISSING])] for name, column in OF_PLACES.items()}
    for table, chunks in ((tables.USER_ACTION, actions), (tables.USER_PROFILE, profiles)):
        for name in CODED[table.name]:
            parts[name] = [*parts.get(name, ()), *(chunk / f"{name}.npy" for chunk in chunks)]
    return {
        name: reduce(np.union1d, (np.load(part) if isinstance(part, Path) else part for part in found))
        for name, found in parts.items()
    }


def _encode_places(places: Mapping[str, np.ndarray], codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    coded = {name: encode(places[column], codes[name]) for name, column in OF_PLACES.items()}
    offsets, members = group_by_cell(coded["cell"], len(codes["cell"]) + 1)
    plain = {"ids": places["poi_id"], "score": places["normalized_score"]}
    located = {name: places[name] for name in store.LOCATION_ARRAYS if name in places}
    return plain | coded | located | {"cell_offsets": offsets, "cell_places": members}


@dataclass(frozen=True)
class ShardMaker:
    """Makes shards, in any process."""

    target: Path
    stamp: Any
    skip_bad: bool
    actions: Sequence[Path]
    profiles: Sequence[Path]
    profile_files: Sequence[TableFile]
    shards: int

    def __call__(self, number: int, progress: Progress) -> dict[str, Any]:
        """Return what shard ``number`` has; it is made unless it is finished."""
        receipt = self.target / store.WORK / f"shard-{number:05d}.json"
        done = store.read_json(receipt)
        if done is None or done["stamp"] != self.stamp or (done["bad"] and not self.skip_bad):
            codes = {path.stem: np.load(path) for path in sorted((self.target / "codes").glob("*.npy"))}
            arrays, repeated = make_shard(number, self.actions, self.profiles, codes)
            bad = BadRows(self.skip_bad)
            if repeated:
                user, first, again = repeated[0]
                first, again = (tables.where(self.profile_files, row, "user_id") for row in (first, again))
                message = f"{again}: user {user} already has a profile in {first}"
                bad.report(f"{tables.USER_PROFILE.name}: repeated user", message, len(repeated))
            store.write_folder(store.shard_folder(self.target, number), arrays)
            counts = {"users": len(arrays["user"]), "sessions": len(arrays["time"])}
            done = {"stamp": self.stamp, "bad": dict(bad.counts), **counts}
            store.write_json(receipt, done)
        progress("sorting (shards)", number + 1, self.shards)
        return done
