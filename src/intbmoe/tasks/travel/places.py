"""The places of IntTravel: ``poi_info``, what ``poi_info_groupby_geographic`` adds to it, and their locations.

The first two tables describe places. If both describe the same place they must agree; a place that only the second has
is also a place (in the published sample, the first lists only places that someone went to). ``poi_location`` is not
part of IntTravel: it is for users who know coordinates or names of the places.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.chunks import Chunk
from intbmoe.tasks.travel.rows import MISSING, Budget, Columns, Reader, find
from intbmoe.tasks.travel.spill import read_note
from intbmoe.tasks.travel.store import NAMES, WORK_FORMAT, write_folder
from intbmoe.tasks.travel.tables import POI_INFO, POI_LOCATION, BadRows, TableFile, row_in_file, where
from intbmoe.tasks.workers import Progress

ID, SCORE, CELL, CATEGORY, REGION = POI_INFO.columns
DETAILS = (CELL, SCORE, CATEGORY, REGION)


def load_places(
    folder: Path, temporary: Path, budget: Budget, tables: Sequence[Sequence[Chunk]], bad: BadRows, progress: Progress
) -> Columns:
    """Return the columns of ``poi_info`` and ``poi_location``, by id; read once from the tables, kept in ``folder``."""
    files, by_cell, locations = ([chunk.file for chunk in chunks if chunk.number == 0] for chunks in tables)
    stamp = [WORK_FORMAT, *(file.stamp() for file in (*files, *by_cell, *locations))]
    note = read_note(folder, stamp, skip_bad=bad.skip)
    if note is None:
        own = BadRows(bad.skip)
        with Reader.open(temporary, budget) as reader:

            def read(files: Sequence[TableFile]) -> Columns:
                """Return all their rows, in order."""
                chunks = (chunk for table in tables for chunk in table if chunk.file in files)
                parts = [reader.read(chunk, own, progress) for chunk in chunks]
                return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

            known = _first_of_each(read(files), files, own)
            if not len(known[ID]):
                raise DataError(f"{files[0].path} holds no place: expected rows of {', '.join(POI_INFO.columns)}")
            for file in by_cell:
                known = _add_cells(known, read([file]), file, own)
            del known["row"]
            if locations:
                known |= _find_locations(known[ID], read(locations), locations, own)
        note = {"stamp": stamp, "bad": own.counts, "columns": list(known)}
        write_folder(folder, known, note)
    bad.counts.update(note["bad"])
    return {name: np.load(folder / f"{name}.npy") for name in note["columns"]}


def _first_of_each(rows: Columns, files: Sequence[TableFile], bad: BadRows) -> Columns:
    """Return one row for each place, by id."""
    _, first, group = np.unique(rows[ID], return_index=True, return_inverse=True)
    again = np.delete(np.arange(len(group)), first)
    if len(again):
        at, before = again[0], where(files, rows["row"][first[group[again[0]]]])
        message = f"{where(files, rows['row'][at], ID)}: place {rows[ID][at]} is already in {before}"
        bad.report(f"{files[0].table.name}: repeated place", message, len(again))
    return {name: column[first] for name, column in rows.items()}


def _add_cells(known: Columns, items: Columns, file: TableFile, bad: BadRows) -> Columns:
    """Return ``known`` and the places that only ``file`` has; of several items for one place, the first counts."""
    at, listed = find(known[ID], items[ID])
    same = listed.copy()
    for field in DETAILS:
        differs = same & (items[field] != known[field][at])
        same &= ~differs
        if differs.any():
            row = int(differs.argmax())
            other = f"but place {items[ID][row]} has {_show(known[field][at[row]])} in {POI_INFO.name}"
            message = f"{file.where(items['row'][row], field)}: {_show(items[field][row])}, {other}"
            bad.report(f"{file.table.name}: differs from {POI_INFO.name}", message, int(differs.sum()))
    added = {name: column[~listed] for name, column in items.items()}
    _, first, group = np.unique(added[ID], return_index=True, return_inverse=True)
    for field in DETAILS:
        differs = added[field] != added[field][first][group]
        if differs.any():
            row, before = int(differs.argmax()), first[group[differs.argmax()]]
            other = f"but {_show(added[field][before])} in row {row_in_file(added['row'][before])}"
            place = f"place {added[ID][row]} has {_show(added[field][row])}, {other}"
            message = f"{file.where(added['row'][row], field)}: {place}"
            bad.report(f"{file.table.name}: repeated place", message, int(differs.sum()))
    joined = {name: np.concatenate([column, added[name][first]]) for name, column in known.items()}
    order = np.argsort(joined[ID])
    return {name: column[order] for name, column in joined.items()}


def _find_locations(ids: np.ndarray, rows: Columns, files: Sequence[TableFile], bad: BadRows) -> Columns:
    """Return longitude, latitude and name of each place; NaN and "" if unknown."""
    _, listed = find(ids, rows[ID])
    beyond = (np.abs(rows["longitude"]) > 180) | (np.abs(rows["latitude"]) > 90)
    half = np.isnan(rows["longitude"]) != np.isnan(rows["latitude"])
    good = np.ones(len(listed), bool)
    for wrong, kind, field, what in (
        (~listed, "unknown place", ID, f"is not a place of {POI_INFO.name}"),
        (beyond, "not on Earth", "longitude", "lies beyond 180° of longitude or 90° of latitude"),
        (half, "half a location", "longitude", "has a longitude or a latitude alone"),
    ):
        wrong &= good
        good &= ~wrong
        if wrong.any():
            row = int(wrong.argmax())
            message = f"{where(files, rows['row'][row], field)}: place {rows[ID][row]} {what}"
            bad.report(f"{POI_LOCATION.name}: {kind}", message, int(wrong.sum()))
    rows = _first_of_each({name: column[good] for name, column in rows.items()}, files, bad)
    at, _ = find(ids, rows[ID])
    found = {"longitude": np.full(len(ids), np.nan), "latitude": np.full(len(ids), np.nan)}
    found[NAMES] = np.full(len(ids), b"", rows["name"].dtype)
    for name, column in found.items():
        column[at] = rows["name" if name == NAMES else name]
    return found


def _show(value: np.generic) -> str:
    return "nothing" if value == MISSING else str(value)
