"""Writes journeys as IntTravel's raw tables: for tests, for benchmarks, and to see what the tables look like."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from intbmoe.tasks.travel.data import JourneyData, Places, Sessions
from intbmoe.tasks.travel.tables import POI_BY_CELL, POI_INFO, POI_LOCATION, USER_ACTION, USER_PROFILE, Table


def write_tables(data: JourneyData, folder: Path, *, header: bool = True) -> None:
    """Write the tables as .tsv: users are numbered from 1, codes are written as they are, and 0 is an empty field.

    Preparing them gives the same arrays back, provided that every code occurs.
    """
    places = data.places
    folder.mkdir(parents=True, exist_ok=True)
    cell, category, region = (_code(column) for column in (places.cell, places.category, places.region))
    _write(folder, POI_INFO, [[places.ids, places.score, cell, category, region]], header)
    _write(folder, POI_BY_CELL, [_cells(places)], header)
    if places.names is not None:
        names = np.array([name.decode() for name in places.names.tolist()], object)
        _write(folder, POI_LOCATION, [[places.ids, places.longitude, places.latitude, names]], header)
    first = np.cumsum([1] + [len(shard.offsets) - 1 for shard in data.shards])
    users = [start + np.arange(len(shard.offsets) - 1) for start, shard in zip(first, data.shards, strict=False)]
    profiles = ([user, *map(_code, shard.profile.T)] for user, shard in zip(users, data.shards, strict=True))
    _write(folder, USER_PROFILE, profiles, header)
    actions = (_actions(user, shard, places) for user, shard in zip(users, data.shards, strict=True))
    _write(folder, USER_ACTION, actions, header)


def _write(folder: Path, table: Table, parts: Iterable[Sequence], header: bool) -> None:
    part_file = folder / f"{table.name}.part"
    options = "FORMAT csv, DELIMITER '\t', HEADER false, QUOTE '', ESCAPE ''"
    import duckdb  # not installed everywhere that this module is imported

    with duckdb.connect() as connection, (folder / f"{table.name}.tsv").open("wb") as file:
        if header:
            file.write("\t".join(table.columns).encode() + b"\n")
        for part in parts:
            columns = dict(zip(table.columns, part, strict=True))  # noqa: F841 (SQL reads it)
            connection.execute(f"COPY (FROM columns) TO '{part_file}' ({options})")
            with part_file.open("rb") as written:
                shutil.copyfileobj(written, file)
            part_file.unlink()


def _actions(user: np.ndarray, shard: Sessions, places: Places) -> list:
    columns = [shard.cell, shard.region, shard.weather, shard.mode]
    return [
        np.repeat(user, np.diff(shard.offsets)),
        np.asarray(shard.time),
        _code(shard.action),
        _poi_id(shard.place, places),
        *map(_code, columns),
        _poi_id(shard.via, places),
    ]


def _cells(places: Places) -> tuple[np.ndarray, np.ndarray]:
    """For each cell with places: its code, and its places as one text."""
    numbers = (places.ids, places.score.astype(str), places.category, places.region)
    items = np.array([",".join(map(str, item)) for item in zip(*(column.tolist() for column in numbers), strict=True)])
    cells = [code for code in range(1, len(places.cell_offsets) - 1) if np.diff(places.cell_offsets)[code]]
    members = (places.cell_places[places.cell_offsets[code] : places.cell_offsets[code + 1]] for code in cells)
    return np.array(cells), np.array([";".join(items[member]) for member in members], object)


def _code(codes: np.ndarray) -> np.ma.MaskedArray:
    return np.ma.masked_equal(np.asarray(codes), 0)


def _poi_id(rows: np.ndarray, places: Places) -> np.ma.MaskedArray:
    return np.ma.masked_array(places.ids[rows], np.asarray(rows) < 0)
