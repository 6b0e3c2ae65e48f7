"""The rows of IntTravel's tables as columns of numbers, one chunk of text at a time.

DuckDB would accept ``1.5``, ``1e2`` and `` 9`` as whole numbers and skip empty lines. So it reads a chunk only if the
chunk has no other bytes than digits, minus, point, tab and line feed, all points are in decimal fields, and all rows
are read as numbers. Any other chunk is read line by line: errors are named, and the rest is kept.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.files import private_folder
from intbmoe.foreign import import_extra
from intbmoe.machine import usable_cores
from intbmoe.tasks.travel.chunks import Chunk
from intbmoe.tasks.travel.tables import POI_BY_CELL, POI_INFO, BadRows, Table, TableFile
from intbmoe.tasks.workers import Progress

MISSING = np.iinfo(np.int64).min
"""Means an empty field in a column of whole numbers."""
WHOLE = re.compile(rb"-?[0-9]+")
DECIMAL = re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
ITEM = ("poi_id", "normalized_score", "category_id", "administrative_region_id")
"""What poi_info_groupby_geographic has for each place of a cell, separated by commas."""
LINE_FEED = b"\n"
PLAIN_BYTES = b"0123456789-.\t\n"  # all bytes in a chunk of plain numbers
TOO_LARGE = b"%d" % 2**63  # −2⁶³ means an empty field
LARGEST_DECIMAL = float(np.finfo(np.float32).max)
LONGEST_QUOTE = 40
LONGEST_NAME = 200  # bytes
TYPES = {"normalized_score": np.float32, "longitude": np.float64, "latitude": np.float64, "name": np.bytes_}
"""Types of columns that are not whole numbers."""
CSV = (
    "auto_detect=false, header=false, delim='\t', quote='', escape='', comment='', nullstr='', "
    "max_line_size=1_000_000, buffer_size=4_000_000"  # DuckDB's own buffers take 32 MB each
)
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Budget:
    """How much is in memory at a time."""

    memory_bytes: int = 4 << 30
    """DuckDB's limit; the rest goes to disk. The arrays of one chunk or shard come on top of it."""
    threads: int | None = None
    """DuckDB's threads; None for as many as there are cores."""
    chunk_bytes: int = 64 << 20
    """Text that is read together; its arrays take about five times as much. An interruption costs one chunk."""
    shard_rows: int = 8_000_000
    """The most rows, approximately, that are sorted together, about 200 bytes each."""

    def shared_by(self, workers: int) -> "Budget":
        """Return the share of each worker, if this many use one machine at a time."""
        threads = self.threads or usable_cores()
        return replace(self, memory_bytes=self.memory_bytes // workers, threads=max(1, threads // workers))


@dataclass(frozen=True)
class Reader:
    """Reads chunks with a database in memory; its overflow, and the text of a chunk, go to ``temporary``."""

    connection: Any
    temporary: Path

    @staticmethod
    @contextmanager
    def open(parent: Path, budget: Budget) -> "Iterator[Reader]":
        duckdb = import_extra("duckdb", "reading IntTravel's tables", "travel")
        with private_folder(parent, "reading-", "") as temporary:
            config = {"memory_limit": f"{budget.memory_bytes >> 20}MiB", "temp_directory": str(temporary)}
            if budget.threads is not None:
                config["threads"] = budget.threads
            with duckdb.connect(config=config) as connection:
                yield Reader(connection, temporary)

    def read(self, chunk: Chunk, bad: BadRows, progress: Progress) -> Columns:
        """Return the good rows: their columns, MISSING for an empty field, and ``row``; a cell has a row per place."""
        (text, cut), file = chunk.read(), chunk.file
        plain = not file.table.text and not text.translate(None, PLAIN_BYTES) and TOO_LARGE not in text
        columns = self._read_plain(chunk, text) if plain else None
        if columns is None:
            columns = _read_lines(chunk, text, bad)
        if cut:
            where = f"{file.where(chunk.first_row + text.count(LINE_FEED))}: the file is cut off here ({cut})"
            message = f"{where}: get it again, or end its last row with a line break"
            bad.report(f"{file.table.name}: file cut off", message)
        size = file.text.stat().st_size
        progress(f"reading {file.path.name} (bytes)", chunk.end or size, size)
        return columns

    def _read_plain(self, chunk: Chunk, text: bytes) -> Columns | None:
        """Return None if a row is malformed: then reading fails, skips rows, or leaves a required field empty."""
        import duckdb

        table = chunk.file.table
        names = [f"unknown_{at}" if name not in table.columns else name for at, name in enumerate(chunk.file.columns)]
        types = ", ".join(f"'{name}': '{'VARCHAR' if name in table.decimal else 'BIGINT'}'" for name in names)
        whole = (name for name in table.columns if name not in table.decimal)
        given = [f"coalesce({name}, ({MISSING})::BIGINT) AS {name}" for name in whole]
        given += [f"{name}::DOUBLE AS {name}, contains({name}, '.') AS {name}_point" for name in table.decimal]
        path, rows = self.temporary / "chunk.tsv", text.count(LINE_FEED)
        path.write_bytes(text)
        query = f"SELECT {', '.join(given)} FROM read_csv(?, {CSV}, columns={{{types}}})"
        try:
            columns = self.connection.execute(query, [str(path)]).fetchnumpy()
        except (duckdb.ConversionException, duckdb.InvalidInputException):
            return None
        points = text.count(b".")
        for name in table.decimal:
            points -= int(columns.pop(f"{name}_point").sum())
            columns[name] = columns[name].astype(TYPES[name])
        odd = any(np.ma.is_masked(column) for column in columns.values()) or points != 0
        odd = odd or any((columns[name] == MISSING).any() for name in table.required)
        odd = odd or not all(np.isfinite(columns[name]).all() for name in table.decimal)
        if odd or len(columns[table.columns[0]]) != rows:
            return None
        return columns | {"row": np.arange(chunk.first_row, chunk.first_row + rows)}

    def distinct(self, values: np.ndarray) -> np.ndarray:
        """Return all values but MISSING, ascending; by hashing, which is faster than sorting millions."""
        given = {"value": values}  # noqa: F841 (SQL reads it)
        query = f"SELECT DISTINCT value FROM given WHERE value != ({MISSING})::BIGINT"
        return np.sort(self.connection.execute(query).fetchnumpy()["value"])


class MalformedError(Exception):
    """A malformed row; its arguments are (kind of error, field or None, what is wrong)."""


def _read_lines(chunk: Chunk, text: bytes, bad: BadRows) -> Columns:
    file, table = chunk.file, chunk.file.table
    pick = [file.columns.index(name) for name in table.columns]
    good: list[tuple] = []
    for row, line in enumerate(text.split(LINE_FEED)[:-1], chunk.first_row):
        try:
            fields = line.split(b"\t")
            _check_length(file, fields)
            values = _read_fields(table, [fields[column] for column in pick])
        except MalformedError as error:
            _report(file, row, error, bad)
            continue
        places = _places_of_cell(file, row, *values, bad) if table == POI_BY_CELL else (values,)
        good += ((row, *place) for place in places)
    names = ("row", *(POI_INFO if table == POI_BY_CELL else table).columns)
    columns = zip(*good, strict=True) if good else ((),) * len(names)
    return {name: np.array(column, TYPES.get(name, np.int64)) for name, column in zip(names, columns, strict=True)}


def _report(file: TableFile, row: int, error: MalformedError, bad: BadRows) -> None:
    kind, field, what = error.args
    bad.report(f"{file.table.name}: {kind}", f"{file.where(row, field)}{what}")


def _check_length(file: TableFile, fields: list[bytes]) -> None:
    found, expected = len(fields), len(file.columns)
    if found < expected:
        what = f", field {file.columns[found]} is missing: {found} fields, expected {expected}"
        raise MalformedError("missing column", None, what)
    if found > expected:
        raise MalformedError("extra column", None, f", extra field: {found} fields, expected {expected}")


def _read_fields(table: Table, fields: list[bytes]) -> list:
    """Return numbers, and the text of ``text`` columns."""
    values = []
    for name, text in zip(table.columns, fields, strict=True):
        value = text if name in table.text else _number(text, decimal=name in table.decimal)
        if value is None:
            raise MalformedError("not a number", name, f": {_quote(text)} is not a number")
        values.append(value)
    for name, text, value in zip(table.columns, fields, values, strict=True):
        if not text and name in table.required:
            raise MalformedError("empty field", name, ": an empty field where a value is needed")
        if name in table.decimal and abs(value) > LARGEST_DECIMAL:
            raise MalformedError("not a number", name, f": {'-' * (value < 0)}inf is not finite")
        if name == "name" and len(text) > LONGEST_NAME:
            raise MalformedError("long name", name, f": {_quote(text)} is longer than {LONGEST_NAME} bytes")
    return values


def _places_of_cell(file: TableFile, row: int, cell: int, text: bytes, bad: BadRows) -> Iterator[list]:
    """Yield the values of ``poi_info`` for each place of a cell."""
    for item in filter(None, text.split(b";")):  # a semicolon at the end gives an empty item
        parts = item.split(b",")
        values = [_number(part, decimal=name == "normalized_score") for name, part in zip(ITEM, parts, strict=False)]
        what = ""
        if len(parts) != len(ITEM):
            what = f"does not have {len(ITEM)} parts"
        elif None in values or not (parts[0] and parts[1]) or abs(values[1]) > LARGEST_DECIMAL:
            what = "does not consist of numbers"
        if what:
            what = f": {_quote(item)} {what}; expected {','.join(ITEM)};…"
            _report(file, row, MalformedError("malformed place", "poi_info", what), bad)
        else:
            place = dict(zip(ITEM, values, strict=True), geographic_id=cell)
            yield [place[name] for name in POI_INFO.columns]


def _number(text: bytes, *, decimal: bool = False) -> int | float | None:
    """Return MISSING or NaN for an empty field, None if it is not a number."""
    if not text:
        return math.nan if decimal else MISSING
    if decimal:
        return float(text) if DECIMAL.fullmatch(text) else None
    if not WHOLE.fullmatch(text) or len(text.lstrip(b"-0")) > 19:
        return None
    value = int(text.lstrip(b"-0") or b"0") * (-1 if text.startswith(b"-") else 1)
    return value if -(2**63) < value < 2**63 else None


def _quote(text: bytes) -> str:
    """Return a field for a message, shortened if it is long."""
    shown = text.decode(errors="replace")
    return repr(shown if len(shown) <= LONGEST_QUOTE else shown[:LONGEST_QUOTE] + "…")


def find(ids: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where ``wanted`` are among the ascending ``ids``, and whether they are there at all."""
    row = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return row, ids[row] == wanted
