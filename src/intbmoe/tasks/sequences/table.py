"""Histories from any table with one row per event: who, what and when, as .csv, .tsv or .parquet.

The columns are found by common names (user_id, movieId, timestamp, …) or given. Users and items can be anything and are
read as text; times are numbers or dates. Rows may be in any order; rows of one user with the same time stay in the
order of the file. Events given in Python are written as such a table.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.checks import some
from intbmoe.foreign import import_extra
from intbmoe.tasks.datasets import column_names, entries
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import fingerprint, require_path, require_same_data, require_size, suggestion, wrong_file
from intbmoe.tasks.sequences.source import ItemSequences

WHAT = "a .csv, .tsv or .parquet file with a row for each event: user, item, time"
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
QUOTE = '"'
SEPARATORS = (",", ";", "\t", "|")
LONGEST_HEADER = 2**16
USUAL = {
    "user": "user userid uid customer customerid visitor visitorid reviewer reviewerid session sessionid",
    "item": "item itemid iid product productid movie movieid asin parentasin poi poiid place placeid venue venueid "
    "business businessid track trackid song songid book bookid isbn article articleid",
    "time": "time timestamp ts date datetime unixreviewtime reviewtime eventtime createdat unixtime utctime",
}
"""Common names of columns, letters and digits only; the first one that a table has is used."""


def read_table(settings: Any, item_count: int | None) -> ItemSequences:
    """Return the histories of the recipe's ``data``, with users and items in the order of their names."""
    duckdb = import_extra("duckdb", "reading tables", "travel")
    file = _find_file(require_path(settings.path, "sequences", WHAT))
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false; SET TimeZone = 'UTC'")
        try:
            rows, there = _open(connection, file)
            columns = {kind: _column(kind, getattr(settings, kind), there, file) for kind in USUAL}
            picked = [f'"{name.replace(QUOTE, QUOTE * 2)}"::VARCHAR AS "{kind}"' for kind, name in columns.items()]
            numbered = ", ".join(["row_number() OVER () AS row", *picked])
            connection.execute(f"CREATE TABLE events AS SELECT {numbered} FROM {rows}")
        except duckdb.Error as error:
            what = " ".join(str(error).partition("Possible")[0].split())
            raise DataError(f"{file} cannot be read: {what}") from error
        sequences = _sequences(connection, columns, file)
    require_size(item_count, sequences.item_count, "model.items", str(file))
    same = fingerprint(sequences.items, sequences.offsets, "\0".join(sequences.names))
    require_same_data(settings.fingerprint, same, str(file))
    return replace(sequences, fingerprint=same)


def _find_file(path: Path) -> Path:
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if _suffix(file) in SUFFIXES and not file.name.startswith("."))
        if len(found) != 1:
            there = f"{len(found)} tables ({some(file.name for file in found)})" if found else "no table"
            raise DataError(f"{path} is a folder with {there}: data.path must be {WHAT}")
        return found[0]
    if _suffix(path) not in SUFFIXES:
        raise wrong_file(path, WHAT)
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: expected {WHAT}")
    return path


def _suffix(file: Path) -> str:
    """Return the suffix without a final .gz, which DuckDB can read directly."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


def _open(connection: Any, file: Path) -> tuple[str, list[str]]:
    """Return SQL for the file's rows, and its columns."""
    if _suffix(file) == ".parquet":
        rows = f"read_parquet({_literal(str(file))})"
        return rows, [row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {rows}").fetchall()]
    # If a row has too few or too many cells, DuckDB's own detection of columns gives up without a line number.
    separator, names = _header(file)
    types = ", ".join(f"{_literal(name)}: 'VARCHAR'" for name in names)
    dialect = f"delim = '{separator}', quote = '{QUOTE}', escape = '{QUOTE}', comment = '', header = true"
    return f"read_csv({_literal(str(file))}, {dialect}, auto_detect = false, columns = {{{types}}})", names


def _header(file: Path) -> tuple[str, list[str]]:
    """Return the separator, the most frequent candidate in the first line, and the names of the columns."""
    try:
        with (gzip.open if file.suffix.lower() == ".gz" else open)(file, "rb") as content:
            line = content.readline(LONGEST_HEADER).decode("utf-8-sig").rstrip("\r\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}; expected {WHAT}") from error
    separator = max(SEPARATORS, key=line.count)
    names = next(csv.reader([line], delimiter=separator), [])
    known = [name.lower() for name in names]
    for name in names:
        if not name or known.count(name.lower()) > 1:
            raise DataError(
                f"{file}, line 1: {name!r} is empty or used twice: expected a name for each column ({some(names)})"
            )
    return separator, names


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _column(kind: str, given: str | None, there: list[str], file: Path) -> str:
    if given is not None:
        if given not in there:
            near = suggestion(given, there)
            raise DataError(f"{file} has no column {given!r} (data.{kind}), only {some(there)}{near}")
        return given
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in reversed(there)}
    for usual in USUAL[kind].split():
        if usual in plain:
            return plain[usual]
    raise DataError(
        f"{file} has no column with a usual name for the {kind}, only {some(there)}: name it (--data.{kind} NAME). "
        f"The first line must have the columns' names"
    )


def _sequences(connection: Any, columns: dict[str, str], file: Path) -> ItemSequences:
    def first(condition: str, *what: str) -> tuple[Any, ...] | None:
        picked = ", ".join(("row", *what))
        return connection.execute(f"SELECT {picked} FROM events WHERE {condition} ORDER BY row LIMIT 1").fetchone()

    if first("true") is None:
        raise DataError(f"{file} has no row below the names of its columns: expected {WHAT}")
    for kind, name in columns.items():
        empty = first(f'"{kind}" IS NULL OR trim("{kind}") = \'\'')
        if empty is not None:
            raise DataError(f"{_where(file, empty[0])}: the column {name!r} is empty: expected one in every row")
    number, date = 'TRY_CAST("time" AS DOUBLE)', 'epoch_us(TRY_CAST("time" AS TIMESTAMPTZ))'
    counted = f"count(*) FILTER (isfinite({number})), count({date})"
    numbers, dates = connection.execute(f"SELECT {counted} FROM events").fetchone()
    moment = number if numbers >= dates else date
    bad = first(f"{moment} IS NULL OR NOT isfinite(({moment})::DOUBLE)", '"time"')
    if bad is not None:
        like = (
            "a number, as the other times are" if moment == number and numbers else "a date such as 2024-05-31 12:30:00"
        )
        wanted = like if numbers or dates else f"a number or {like}"
        raise DataError(f"{_where(file, bad[0])}: the time {bad[1]!r} (column {columns['time']!r}) is not {wanted}")
    for kind in ("user", "item"):
        connection.execute(
            f'CREATE TABLE "{kind}s" AS SELECT "{kind}" AS name, '
            f'row_number() OVER (ORDER BY TRY_CAST("{kind}" AS BIGINT) NULLS LAST, "{kind}") - 1 AS id '
            f'FROM (SELECT DISTINCT "{kind}" FROM events)'
        )
    found = connection.execute(
        'SELECT users.id AS "user", items.id AS "item" FROM events JOIN users ON events."user" = users.name '
        f'JOIN items ON events."item" = items.name ORDER BY users.id, {moment}, row'
    ).fetchnumpy()
    names = tuple(row[0] for row in connection.execute("SELECT name FROM items ORDER BY id").fetchall())
    starts = np.flatnonzero(np.diff(found["user"], prepend=-1))
    offsets = np.append(starts, len(found["user"])).astype(np.int64)
    return ItemSequences(found["item"].astype(np.int64), offsets, len(names), names)


def _where(file: Path, row: int) -> str:
    """Return the place for a message: rows count from 1, and in text files the column names are line 1."""
    return f"{file}, row {row}" if _suffix(file) == ".parquet" else f"{file}, line {row + 1}"


def save_events(data: Any, folder: Path) -> None:
    """Write (user, item, time) rows; or dicts, or a table of columns, whose names are found like those of a file."""
    columns = column_names(data)
    with open(folder / "events.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if columns is not None:
            values = [_values(data[name]) for name in columns]
            if len({*map(len, values)}) > 1:
                told = some(f"{name} {len(column)}" for name, column in zip(columns, values, strict=True))
                raise DataError(f"data has columns of different lengths: {told}")
            writer.writerow(columns)
            writer.writerows(zip(*values, strict=True))
            return
        for index, entry in enumerate(entries(data, "data")):
            if isinstance(entry, Mapping):
                names = tuple(map(str, entry))
                row = list(entry.values())
            else:
                names, row = tuple(USUAL), entry
            if not isinstance(row, tuple | list) or len(row) != len(names):
                raise DataError(f"data[{index}] is {entry!r}: expected (user, item, time), or a dict with these")
            if index == 0:
                header = names
                writer.writerow(header)
            elif names != header:
                raise DataError(f"data[{index}] has {', '.join(names)}, but data[0] has {', '.join(header)}")
            writer.writerow(row)


def _values(column: Any) -> list[Any]:
    for name in ("to_pylist", "tolist"):  # Arrow's, and numpy's, torch's and pandas'
        if hasattr(column, name):
            return getattr(column, name)()
    return list(column)
