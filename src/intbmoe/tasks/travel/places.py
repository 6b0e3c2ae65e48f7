"""The places of IntTravel: ``poi_info``, and what ``poi_info_groupby_geographic`` adds to it.

Both tables describe places. Where both describe the same one they must agree; a place that only the second has is a
place as well (the published sample lists in the first only places that somebody went to).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.preparation import Progress
from intbmoe.tasks.travel.folders import read_arrays, read_note, write_folder
from intbmoe.tasks.travel.parse import MISSING, Rows, check, parse, quote, to_numbers
from intbmoe.tasks.travel.tables import POI_INFO, BadRows, TableFile, read_blocks

FIELDS = POI_INFO.columns
ID, SCORE, CELL, CATEGORY, REGION = FIELDS
ITEM = (ID, SCORE, CATEGORY, REGION)
"""What the second table says of each place of a cell, separated by commas."""


def read_places(
    folder: Path,
    files: Sequence[TableFile],
    by_cell: Sequence[TableFile],
    block_bytes: int,
    bad: BadRows,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """The columns of ``poi_info`` for all places, ascending by id; kept in ``folder``."""
    stamp = [file.stamp() for file in (*files, *by_cell)]
    note = read_note(folder, stamp)
    if note is None or (note["bad"] and not bad.skip):
        own = BadRows(bad.skip)
        places = _read_poi_info(files, block_bytes, own, progress)
        for file in by_cell:
            places = _add_cells(places, file, block_bytes, own, progress)
        note = {"stamp": stamp, "bad": dict(own.counts)}
        write_folder(folder, places, note)
    bad.counts.update(note["bad"])
    return read_arrays(folder, FIELDS)


def _read_poi_info(
    files: Sequence[TableFile], block_bytes: int, bad: BadRows, progress: Progress
) -> dict[str, np.ndarray]:
    parts, file_of = [], []
    for file in files:
        row = file.first_row
        for block in read_blocks(file, block_bytes, file.start):
            rows = parse(file, block, row, bad)
            rows = check(file, rows, SCORE, ~np.isfinite(rows.columns[SCORE]), "not a number", "is not finite", bad)
            parts.append(rows)
            file_of.append(file)
            row += block.text.count(b"\n")
            progress(f"reading {POI_INFO.name} (rows)", row - file.first_row, None)
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in FIELDS}
    number = np.concatenate([part.number for part in parts])
    if not len(number):
        raise DataError(f"{files[0].path} holds no place: expected rows of {', '.join(FIELDS)}")
    origin = np.repeat(np.arange(len(parts)), [len(part.number) for part in parts])
    order = np.argsort(columns[ID], kind="stable")
    again = np.flatnonzero(columns[ID][order][1:] == columns[ID][order][:-1]) + 1
    if len(again):
        second = order[again].min()
        first = order[np.searchsorted(columns[ID][order], columns[ID][second])]
        file = file_of[origin[second]]
        before = file_of[origin[first]].where(number[first])
        message = f"{file.where(number[second], ID)}: place {columns[ID][second]} is already in {before}"
        bad.report(f"{POI_INFO.name}: repeated place", message, len(again))
        order = np.delete(order, again)
    return {name: column[order] for name, column in columns.items()}


def _add_cells(
    places: dict[str, np.ndarray], file: TableFile, block_bytes: int, bad: BadRows, progress: Progress
) -> dict[str, np.ndarray]:
    """``places`` with those that only ``file`` has."""
    row, added = file.first_row, []
    for block in read_blocks(file, block_bytes, file.start):
        rows = _items(file, parse(file, block, row, bad), bad)
        known = find_places(places[ID], rows.columns[ID])
        there = known >= 0
        for field in (CELL, SCORE, CATEGORY, REGION):
            differs = there & (rows.columns[field] != places[field][known])
            if differs.any():
                first = int(differs.argmax())
                listed = f"place {rows.columns[ID][first]} has {_show(places[field][known[first]])} in {POI_INFO.name}"
                message = f"{file.where(rows.number[first], field)}: {_show(rows.columns[field][first])}, but {listed}"
                bad.report(f"{file.table.name}: differs from {POI_INFO.name}", message, int(differs.sum()))
                there &= ~differs
        added.append(rows.keep(known < 0))
        row += block.text.count(b"\n")
        progress(f"reading {file.table.name} (rows)", row - file.first_row, None)
    numbers = np.concatenate([rows.number for rows in added])
    new = {name: np.concatenate([rows.columns[name] for rows in added]) for name in FIELDS}
    new = _drop_repeats(file, numbers, new, bad)
    joined = {name: np.concatenate([places[name], new[name]]) for name in FIELDS}
    order = np.argsort(joined[ID], kind="stable")
    return {name: column[order] for name, column in joined.items()}


def _drop_repeats(
    file: TableFile, number: np.ndarray, columns: dict[str, np.ndarray], bad: BadRows
) -> dict[str, np.ndarray]:
    """The first of several items for the same new place; they must say the same."""
    _, first, group = np.unique(columns[ID], return_index=True, return_inverse=True)
    for field in (CELL, SCORE, CATEGORY, REGION):
        differs = columns[field] != columns[field][first][group]
        if differs.any():
            row = int(differs.argmax())
            before = f"{_show(columns[field][first][group][row])} in row {number[first][group][row]}"
            message = f"{file.where(number[row], field)}: place {columns[ID][row]} has {_show(columns[field][row])}"
            bad.report(f"{file.table.name}: repeated place", f"{message}, but {before}", int(differs.sum()))
    return {name: column[first] for name, column in columns.items()}


def _items(file: TableFile, rows: Rows, bad: BadRows) -> Rows:
    """One row for each place of each cell."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = pc.split_pattern(pa.array(list(rows.columns["poi_info"]), pa.large_binary()), ";")
    items = lists.flatten()
    row = np.repeat(np.arange(len(lists)), pc.list_value_length(lists).to_numpy())
    given = pc.binary_length(items).to_numpy() > 0  # an empty one comes from a semicolon at the end
    items, row = items.filter(pa.array(given)), row[given]
    fields = pc.split_pattern(items, ",")
    whole = pc.list_value_length(fields).to_numpy() == len(ITEM)

    def blame(wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            first = int(wrong.argmax())
            where = file.where(rows.number[row[first]], "poi_info")
            message = f"{where}: {quote(items[first].as_py())} {what}; expected {','.join(ITEM)};…"
            bad.report(f"{file.table.name}: malformed place", message, int(wrong.sum()))

    blame(~whole, f"does not have {len(ITEM)} parts")
    items, row = items.filter(pa.array(whole)), row[whole]
    flat = fields.filter(pa.array(whole)).flatten()
    columns: dict[str, np.ndarray] = {CELL: rows.columns[CELL][row]}
    unread = np.zeros(len(row), bool)
    for number, name in enumerate(ITEM):
        text = flat.take(pa.array(np.arange(number, len(flat), len(ITEM))))
        columns[name], wrong = to_numbers(text, decimal=name == SCORE)
        empty = columns[name] == MISSING if name == ID else ~np.isfinite(columns[name])
        unread |= wrong | empty
    blame(unread, "does not consist of numbers")
    return Rows(rows.number[row], columns).keep(~unread)


def find_places(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The row of each wanted id among the ascending ``ids``, −1 for one that is not there."""
    row = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[row] == wanted, row, -1).astype(np.int32)


def _show(value: Any) -> str:
    return "nothing" if value == MISSING else str(value)
