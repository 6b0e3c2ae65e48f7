"""The places of IntTravel: ``poi_info``, and what ``poi_info_groupby_geographic`` adds to it.

Both tables describe places. Where both describe the same one they must agree; a place that only the second has is a
place as well (the published sample lists in the first only places that somebody went to).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.preparation import Progress
from intbmoe.tasks.travel.duck import FILE_BITS, Reader, or_missing, where
from intbmoe.tasks.travel.spill import read_note
from intbmoe.tasks.travel.store import write_folder
from intbmoe.tasks.travel.tables import POI_INFO, BadRows, TableFile

COLUMNS = ", ".join(POI_INFO.columns)
ID, SCORE, CELL, CATEGORY, REGION = POI_INFO.columns
DETAILS = (CELL, SCORE, CATEGORY, REGION)
FIRST = f"QUALIFY row_number() OVER (PARTITION BY {ID} ORDER BY rowid) = 1"


def load_places(
    reader: Reader,
    folder: Path,
    files: Sequence[TableFile],
    by_cell: Sequence[TableFile],
    bad: BadRows,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """The columns of ``poi_info``, sorted by id, MISSING for an empty field. Kept in ``folder``, and read once."""
    stamp = [file.stamp() for file in (*files, *by_cell)]
    note = read_note(folder, stamp, skip_bad=bad.skip)
    if note is None:
        own = BadRows(bad.skip)
        _read_poi_info(reader, files, own, progress)
        for file in by_cell:
            _add_cells(reader, file, own, progress)
        columns = f"{ID}, {SCORE}, {or_missing((CELL, CATEGORY, REGION))}"
        places = reader.connection.execute(f"SELECT {columns} FROM known ORDER BY {ID}").fetchnumpy()
        reader.connection.execute("DROP TABLE known")
        note = {"stamp": stamp, "bad": dict(own.counts)}
        write_folder(folder, places, note)
    bad.counts.update(note["bad"])
    return {name: np.load(folder / f"{name}.npy") for name in POI_INFO.columns}


def _load(reader: Reader, table: str, files: Sequence[TableFile], bad: BadRows, progress: Progress) -> None:
    """Make ``table`` of the rows of ``files``, in their order."""
    types = ", ".join(f"{name} {'FLOAT' if name == SCORE else 'BIGINT'}" for name in POI_INFO.columns)
    reader.connection.execute(f"CREATE OR REPLACE TABLE {table} (number BIGINT, {types})")
    for position, file in enumerate(files):
        for chunk in reader.chunks(file, file.start, file.first_row):
            rows = f"SELECT {position << FILE_BITS} + row, {COLUMNS} FROM {reader.mended(chunk, bad)}"
            reader.connection.execute(f"INSERT INTO {table} {rows}")
            chunk.report_cut(bad)
            progress(f"reading {file.table.name} (rows)", chunk.first_row + chunk.rows - file.first_row, None)


def _read_poi_info(reader: Reader, files: Sequence[TableFile], bad: BadRows, progress: Progress) -> None:
    """Make the table ``known``."""
    execute = reader.connection.execute
    _load(reader, "listed", files, bad, progress)
    execute(f"CREATE OR REPLACE TABLE known AS FROM listed {FIRST}")
    rows, places = (execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("listed", "known"))
    if not rows:
        raise DataError(f"{files[0].path} holds no place: expected rows of {COLUMNS}")
    if rows > places:
        place, number, before = execute(
            f"SELECT {ID}, l.number, k.number FROM listed l JOIN known k USING ({ID}) WHERE l.number > k.number "
            "ORDER BY l.number LIMIT 1"
        ).fetchone()
        message = f"{where(files, number, ID)}: place {place} is already in {where(files, before)}"
        bad.report(f"{POI_INFO.name}: repeated place", message, rows - places)
    execute("DROP TABLE listed")


def _add_cells(reader: Reader, file: TableFile, bad: BadRows, progress: Progress) -> None:
    """Add the places to ``known`` that only ``file`` has; the first of several items for the same one counts."""
    execute = reader.connection.execute
    _load(reader, "items", [file], bad, progress)
    for at, field in enumerate(DETAILS):
        for row, place, value, other, _, number in _differing(reader, "known", field, DETAILS[:at]):
            listed = f"but place {place} has {_show(other)} in {POI_INFO.name}"
            message = f"{file.where(row, field)}: {_show(value)}, {listed}"
            bad.report(f"{file.table.name}: differs from {POI_INFO.name}", message, number)
    execute(f"CREATE OR REPLACE TABLE added AS FROM items WHERE {ID} NOT IN (SELECT {ID} FROM known) {FIRST}")
    for field in DETAILS:
        for row, place, value, other, before, number in _differing(reader, "added", field, ()):
            message = f"{file.where(row, field)}: place {place} has {_show(value)}, but {_show(other)} in row {before}"
            bad.report(f"{file.table.name}: repeated place", message, number)
    execute("INSERT INTO known FROM added")
    execute("DROP TABLE items")
    execute("DROP TABLE added")


def _differing(reader: Reader, table: str, field: str, equal: Sequence[str]) -> list[tuple]:
    """The first item that says something else than ``table``, with the number of such; none, or one in a list."""
    conditions = [
        f"i.{field} IS DISTINCT FROM t.{field}",
        *(f"i.{name} IS NOT DISTINCT FROM t.{name}" for name in equal),
    ]
    return reader.connection.execute(
        f"SELECT i.number, {ID}, i.{field}, t.{field}, t.number, count(*) OVER () FROM items i "
        f"JOIN {table} t USING ({ID}) WHERE {' AND '.join(conditions)} ORDER BY i.rowid LIMIT 1"
    ).fetchall()


def _show(value: float | int | None) -> str:
    return "nothing" if value is None else str(np.float32(value) if isinstance(value, float) else value)
