"""Rows of text that DuckDB cannot be trusted with, read line by line: what is wrong is named, the rest made regular.

DuckDB would take ``1.5``, ``1e2`` and `` 9`` for whole numbers and pass over empty lines. So it reads a chunk as it is
only if that has no other bytes than digits, minus, tab and line feed, and all of its rows are read as numbers. Any
other chunk, and the two small tables of places, come here first.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from intbmoe.tasks.travel.tables import POI_INFO, BadRows, Chunk, Table, TableFile

MISSING = np.iinfo(np.int64).min
"""Stands for an empty field in a column of whole numbers."""
WHOLE = re.compile(rb"-?[0-9]+")
DECIMAL = re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
ITEM = ("poi_id", "normalized_score", "category_id", "administrative_region_id")
"""What poi_info_groupby_geographic says of each place of a cell, separated by commas."""
LARGEST_DECIMAL = float(np.finfo(np.float32).max)
LONGEST_QUOTE = 40


class MalformedError(Exception):
    """(kind of mistake, field or None, what is wrong)."""


def mend(chunk: Chunk, to: Path, bad: BadRows) -> None:
    """Write the good rows of ``chunk`` as (row number, fields in the table's order); of cells, one for each place."""
    file = chunk.file
    pick = [file.columns.index(name) for name in file.table.columns]
    usual = _usual_row(file)
    with chunk.path.open("rb") as lines, to.open("wb") as out:
        for row, line in enumerate(lines, chunk.first_row):
            fields, odd = line[:-1].split(b"\t"), not usual(line)
            try:
                if odd:
                    _check_length(file, fields)
                fields = [fields[column] for column in pick]
                if odd:
                    _check_fields(file.table, fields)
            except MalformedError as error:
                _report(file, row, error, bad)
                continue
            for good in _places_of_cell(file, row, fields, bad) if file.table.text else (fields,):
                out.write(b"%d\t%b\n" % (row, b"\t".join(good)))


def _report(file: TableFile, row: int, error: MalformedError, bad: BadRows) -> None:
    kind, field, what = error.args
    bad.report(f"{file.table.name}: {kind}", f"{file.where(row, field)}{what}")


def _usual_row(file: TableFile) -> Callable[[bytes], re.Match | None]:
    """Matches lines in which nothing needs a closer look."""
    table = file.table
    patterns = dict.fromkeys(table.columns, rb"-?[0-9]{1,18}") | dict.fromkeys(table.text, rb"[^\t\n]*")
    patterns |= dict.fromkeys(table.decimal, rb"-?[0-9]{1,18}(?:\.[0-9]{1,18})?")
    patterns |= {name: b"(?:%b)?" % patterns[name] for name in table.columns if name not in table.required}
    return re.compile(b"\t".join(patterns.get(name, rb"[^\t\n]*") for name in file.columns) + b"\n").fullmatch


def _check_length(file: TableFile, fields: list[bytes]) -> None:
    found, expected = len(fields), len(file.columns)
    if found < expected:
        what = f", field {file.columns[found]} is missing: {found} fields, expected {expected}"
        raise MalformedError("missing column", None, what)
    if found > expected:
        raise MalformedError("extra column", None, f", extra field: {found} fields, expected {expected}")


def _check_fields(table: Table, fields: list[bytes]) -> None:
    given = {name: text for name, text in zip(table.columns, fields, strict=True) if name not in table.text}
    for name, text in given.items():
        if text and not _is_number(text, decimal=name in table.decimal):
            raise MalformedError("not a number", name, f": {_quote(text)} is not a number")
    for name in table.required:
        if not given[name]:
            raise MalformedError("empty field", name, ": an empty field where a value is needed")
    for name in table.decimal:
        if not _is_finite(given[name]):
            raise MalformedError("not a number", name, f": {'-' * given[name].startswith(b'-')}inf is not finite")


def _places_of_cell(file: TableFile, row: int, fields: list[bytes], bad: BadRows) -> Iterator[list[bytes]]:
    """The fields of ``poi_info`` for each place of a cell."""
    cell, text = fields
    for item in filter(None, text.split(b";")):  # an empty one comes from a semicolon at the end
        parts = item.split(b",")
        what = ""
        if len(parts) != len(ITEM):
            what = f"does not have {len(ITEM)} parts"
        elif not _is_place(*parts):
            what = "does not consist of numbers"
        if what:
            what = f": {_quote(item)} {what}; expected {','.join(ITEM)};…"
            _report(file, row, MalformedError("malformed place", "poi_info", what), bad)
        else:
            place = dict(zip(ITEM, parts, strict=True), geographic_id=cell)
            yield [place[name] for name in POI_INFO.columns]


def _is_place(poi: bytes, score: bytes, *codes: bytes) -> bool:
    whole = _is_number(poi) and all(not code or _is_number(code) for code in codes)
    return whole and _is_number(score, decimal=True) and _is_finite(score)


def _is_number(text: bytes, *, decimal: bool = False) -> bool:
    if decimal:
        return DECIMAL.fullmatch(text) is not None
    if not WHOLE.fullmatch(text) or len(text.lstrip(b"-0")) > 19:
        return False
    return -(2**63) < int(b"-" * text.startswith(b"-") + (text.lstrip(b"-0") or b"0")) < 2**63


def _is_finite(decimal: bytes) -> bool:
    return abs(float(decimal)) <= LARGEST_DECIMAL


def _quote(text: bytes) -> str:
    """A field for a message, not too long."""
    shown = text.decode(errors="replace")
    return repr(shown if len(shown) <= LONGEST_QUOTE else shown[:LONGEST_QUOTE] + "…")
