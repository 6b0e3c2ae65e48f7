"""IntTravel's raw tables → arrays, out of core: ``intbmoe prepare inttravel SOURCE TARGET``.

    1  places    both tables of places become one
    2  reading   user_action and user_profile, a chunk at a time: parsed by DuckDB, checked, kept by shard
    3  codes     all values that a field takes
    4  sorting   a shard at a time: its rows sorted by user and time, joined into sessions, with the users' profiles
    5  the rest  where the splits begin, and meta.json, which says that all is there

A shard has the users whose number falls to it. Steps are repeated only as far as their results are missing or the
files they came from have changed. What is written does not depend on where it was interrupted, nor on the budget but
for the size of shards.
"""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.preparation import Progress
from intbmoe.tasks.travel import store, tables
from intbmoe.tasks.travel.data import group_by_cell
from intbmoe.tasks.travel.places import load_places
from intbmoe.tasks.travel.rows import MISSING, Budget, Reader, connect, where
from intbmoe.tasks.travel.shards import encode, make_shard
from intbmoe.tasks.travel.spill import CODED, Spill
from intbmoe.tasks.travel.splits import split_times
from intbmoe.tasks.travel.tables import BadRows, TableFile

ROW_BYTES, GZIP_RATIO = 40, 5
"""A row of user_action is hardly shorter, and gzip hardly packs it closer: there are rather too many shards."""
SIZES = {"places": "places", "category": "categories"}
SIZES |= {name: f"{name}s" for name in ("cell", "region", "weather", "mode", "action")}
OF_PLACES = {"cell": "geographic_id", "category": "category_id", "region": "administrative_region_id"}


def prepare(
    source: Path, target: Path, *, skip_bad: bool, progress: Progress, budget: Budget | None = None
) -> Mapping[str, Any]:
    """Make ``target`` and say what is in it. The first malformed row raises ``DataError``, or all are counted."""
    source, target = Path(source).expanduser(), Path(target).expanduser()
    files = _find_tables(source)
    names = {file.path.name: file.path.stat().st_size for table in files.values() for file in table}
    meta = store.read_json(target / store.META)
    if meta is None:
        meta = _make(files, target, BadRows(skip_bad), progress, budget or Budget(), {"source": names})
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
            raise DataError(f"{source} has no file {names} (.tsv, .txt or .gz will do too): see docs/data.md")
    return files


def _make(
    files: Mapping[str, list[TableFile]],
    target: Path,
    bad: BadRows,
    progress: Progress,
    budget: Budget,
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """All steps; the content of meta.json, of which ``known`` is a part."""
    work = target / store.WORK
    temporary = work / "temporary"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    poi_files = files[tables.POI_INFO.name], files[tables.POI_BY_CELL.name], files[tables.POI_LOCATION.name]
    action_files, profile_files = files[tables.USER_ACTION.name], files[tables.USER_PROFILE.name]
    sizes = [file.path.stat().st_size * (GZIP_RATIO if file.zipped else 1) for file in action_files]
    shards = math.ceil(sum(sizes) / ROW_BYTES / budget.shard_rows)
    with connect(temporary, budget) as connection:
        reader = Reader(connection, temporary, budget.chunk_bytes)
        places = load_places(reader, work / "places", *poi_files, bad, progress)
        ids = places["poi_id"]
        stamps = [[file.stamp() for file in table] for table in poi_files]
        actions, rows = Spill(reader, work / "actions", shards, ids, stamps).run(action_files, bad, progress)
        if not rows:
            raise DataError(f"{action_files[0].path} holds no action that can be used")
        profiles, _ = Spill(reader, work / "profiles", shards, ids, None).run(profile_files, bad, progress)
    codes = _collect_codes(places, actions, profiles)
    store.write_folder(target / "codes", codes)
    store.write_folder(target / "places", _encode_places(places, codes))
    number_of = {"places": len(ids)} | {name: len(values) + 1 for name, values in codes.items()}
    del places, ids  # the largest thing in memory, and no longer needed
    stamp = [store.WORK_FORMAT, [file.stamp() for table in files.values() for file in table], shards]
    users, sessions = 0, 0
    for number, done in _write_shards(target, shards, stamp, bad.skip, actions, profiles, codes, profile_files):
        users, sessions = users + done["users"], sessions + done["sessions"]
        bad.counts.update(done["bad"])
        progress("sorting (shards)", number + 1, shards)
    valid_from, test_from = split_times(
        lambda: (np.load(store.shard_folder(target, number) / "time.npy") for number in range(shards))
    )
    meta = {
        "format": store.FORMAT,
        **known,
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
        "skipped": dict(sorted(bad.counts.items())),
    }
    store.write_json(target / store.META, meta)
    return meta


def _collect_codes(
    places: Mapping[str, np.ndarray], actions: Sequence[Path], profiles: Sequence[Path]
) -> dict[str, np.ndarray]:
    """Of each field all values, ascending: the first has code 1."""
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


def _write_shards(
    target: Path,
    shards: int,
    stamp: Any,
    skip_bad: bool,
    actions: Sequence[Path],
    profiles: Sequence[Path],
    codes: Mapping[str, np.ndarray],
    profile_files: Sequence[TableFile],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of each shard its number and what it has; those that are finished are not made again."""
    for stale in set((target / "shards").glob("*")) - {store.shard_folder(target, number) for number in range(shards)}:
        shutil.rmtree(stale)  # of a preparation before the tables were changed
    for number in range(shards):
        receipt = target / store.WORK / f"shard-{number:05d}.json"
        done = store.read_json(receipt)
        if done is None or done["stamp"] != stamp or (done["bad"] and not skip_bad):
            arrays, repeated = make_shard(number, actions, profiles, codes)
            bad = BadRows(skip_bad)
            if repeated:
                user, first, again = repeated[0]
                first, again = (where(profile_files, int(row), "user_id") for row in (first, again))
                message = f"{again}: user {user} already has a profile in {first}"
                bad.report(f"{tables.USER_PROFILE.name}: repeated user", message, len(repeated))
            store.write_folder(store.shard_folder(target, number), arrays)
            counts = {"users": len(arrays["user"]), "sessions": len(arrays["time"])}
            done = {"stamp": stamp, "bad": dict(bad.counts), **counts}
            store.write_json(receipt, done)
        yield number, done
