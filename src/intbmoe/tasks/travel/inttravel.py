"""IntTravel's raw tables → arrays, out of core with DuckDB: ``intbmoe prepare inttravel SOURCE TARGET``.

    1  places    both tables of places become one
    2  reading   user_action and user_profile, a chunk at a time; each is checked and kept, its rows grouped by shard
    3  codes     all values that a field takes
    4  sorting   a shard at a time: its rows sorted by user and time, joined into sessions, with the users' profiles
    5  the rest  where the splits begin, and meta.json, which says that all is there

A shard has the users whose number falls to it. Steps are repeated only as far as their results are missing or the
files they came from have changed. What is written does not depend on where it was interrupted, nor on the budget but
for the size of shards.
"""

import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.preparation import Progress
from intbmoe.tasks.travel.data import group_by_cell
from intbmoe.tasks.travel.duck import Budget, Reader, connect, where
from intbmoe.tasks.travel.places import load_places
from intbmoe.tasks.travel.shards import make_shard, with_codes
from intbmoe.tasks.travel.spill import CODED, SHARD_OF, Spill, parquet
from intbmoe.tasks.travel.splits import split_times
from intbmoe.tasks.travel.store import FORMAT, META, WORK, read_json, shard_folder, write_folder, write_json
from intbmoe.tasks.travel.tables import (
    NEEDS_DUCKDB,
    POI_BY_CELL,
    POI_INFO,
    TABLES,
    USER_ACTION,
    USER_PROFILE,
    BadRows,
    TableFile,
    find_files,
)

ROW_BYTES, GZIP_RATIO = 40, 5
"""A row of user_action is hardly shorter, and gzip hardly packs it closer: there are rather too many shards."""
OF_PLACES = {"cell": "geographic_id", "category": "category_id", "region": "administrative_region_id"}


def prepare(
    source: Path, target: Path, *, skip_bad: bool, progress: Progress, budget: Budget | None = None
) -> Mapping[str, Any]:
    """Make ``target`` and say what is in it. The first malformed row raises ``DataError``, or all are counted."""
    if find_spec("duckdb") is None:
        raise ModuleNotFoundError(NEEDS_DUCKDB)
    source, target = Path(source).expanduser(), Path(target).expanduser()
    files = _find_tables(source)
    names = {file.path.name: file.path.stat().st_size for table in files.values() for file in table}
    meta = read_json(target / META)
    if meta is None:
        meta = _make(files, target, BadRows(skip_bad), progress, budget or Budget(), {"source": names})
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


def _make(
    files: Mapping[str, list[TableFile]],
    target: Path,
    bad: BadRows,
    progress: Progress,
    budget: Budget,
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """All steps; the content of meta.json, of which ``known`` is a part."""
    temporary = target / WORK / "temporary"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    poi_files = files[POI_INFO.name], files[POI_BY_CELL.name]
    action_files, profile_files = files[USER_ACTION.name], files[USER_PROFILE.name]
    sizes = [file.path.stat().st_size * (GZIP_RATIO if file.zipped else 1) for file in action_files]
    shards = math.ceil(sum(sizes) / ROW_BYTES / budget.shard_rows)
    with connect(temporary, budget) as connection:
        reader = Reader(connection, temporary, budget.chunk_bytes)
        connection.execute(SHARD_OF)
        places = load_places(reader, target / WORK / "places.parquet", *poi_files, bad, progress)
        stamps = [[file.stamp() for file in table] for table in poi_files]
        actions, rows = Spill(reader, target / WORK / "actions", shards, stamps).run(action_files, bad, progress)
        if not rows:
            raise DataError(f"{action_files[0].path} holds no action that can be used")
        profiles, _ = Spill(reader, target / WORK / "profiles", shards, None).run(profile_files, bad, progress)
        codes = _write_codes(connection, target, actions, profiles)
        _write_places(connection, target, codes["cell"])
        stamp = [[file.stamp() for table in files.values() for file in table], shards]
        users, sessions = 0, 0
        for number, done in _write_shards(
            connection, target, shards, stamp, bad.skip, actions, profiles, profile_files
        ):
            users, sessions = users + done["users"], sessions + done["sessions"]
            bad.counts.update(done["bad"])
            progress("sorting (shards)", number + 1, shards)
    valid_from, test_from = split_times(
        lambda: (np.load(shard_folder(target, number) / "time.npy") for number in range(shards))
    )
    meta = {
        "format": FORMAT,
        **known,
        "rows": rows,
        "sessions": sessions,
        "users": users,
        "places": places,
        "shards": shards,
        "sizes": {
            "places": places,
            "cells": codes["cell"],
            "regions": codes["region"],
            "categories": codes["category"],
            "weathers": codes["weather"],
            "modes": codes["mode"],
            "actions": codes["action"],
            "profile": [codes[name] for name in CODED[USER_PROFILE.name]],
        },
        "valid_from": valid_from,
        "test_from": test_from,
        "skipped": dict(sorted(bad.counts.items())),
    }
    write_json(target / META, meta)
    return meta


def _write_codes(connection: Any, target: Path, actions: Sequence[Path], profiles: Sequence[Path]) -> dict[str, int]:
    """Of each field all values, ascending: the first has code 1. Kept as tables, too. How many codes there are."""
    codes = {}
    sources: dict[str, list[str]] = defaultdict(list)
    for name, column in OF_PLACES.items():
        sources[name].append(f"SELECT {column} AS value FROM places")
    for table, chunks in ((USER_ACTION, actions), (USER_PROFILE, profiles)):
        for name in CODED[table.name]:
            sources[name].append(f"SELECT {name} AS value FROM {parquet(chunks)} WHERE shard >= 0")
    for name, parts in sources.items():
        connection.execute(
            f"CREATE TABLE code_{name} AS SELECT value, row_number() OVER (ORDER BY value)::INTEGER AS code "
            f"FROM (SELECT DISTINCT value FROM ({' UNION ALL '.join(parts)}) WHERE value IS NOT NULL)"
        )
        codes[name] = connection.execute(f"SELECT value FROM code_{name} ORDER BY code").fetchnumpy()["value"]
    write_folder(target / "codes", codes)
    return {name: len(values) + 1 for name, values in codes.items()}


def _write_places(connection: Any, target: Path, cells: int) -> None:
    query = with_codes("places", "poi_id AS ids, normalized_score AS score", OF_PLACES)
    places = connection.execute(f"{query} ORDER BY poi_id").fetchnumpy()
    offsets, members = group_by_cell(places["cell"], cells)
    write_folder(target / "places", places | {"cell_offsets": offsets, "cell_places": members})
    connection.execute("DROP TABLE places")


def _write_shards(
    connection: Any,
    target: Path,
    shards: int,
    stamp: Any,
    skip_bad: bool,
    actions: Sequence[Path],
    profiles: Sequence[Path],
    profile_files: Sequence[TableFile],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of each shard its number and what it has; those that are finished are not made again."""
    for stale in set((target / "shards").glob("*")) - {shard_folder(target, number) for number in range(shards)}:
        shutil.rmtree(stale)  # of a preparation before the tables were changed
    for number in range(shards):
        receipt = target / WORK / f"shard-{number:05d}.json"
        done = read_json(receipt)
        if done is None or done["stamp"] != stamp or (done["bad"] and not skip_bad):
            arrays, repeated = make_shard(connection, number, actions, profiles)
            bad = BadRows(skip_bad)
            if repeated:
                user, first, again = repeated[0]
                first, again = (where(profile_files, int(row), "user_id") for row in (first, again))
                message = f"{again}: user {user} already has a profile in {first}"
                bad.report(f"{USER_PROFILE.name}: repeated user", message, len(repeated))
            write_folder(shard_folder(target, number), arrays)
            counts = {"users": len(arrays["user"]), "sessions": len(arrays["time"])}
            done = {"stamp": stamp, "bad": dict(bad.counts), **counts}
            write_json(receipt, done)
        yield number, done
