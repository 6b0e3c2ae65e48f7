"""Rows of text → columns of numbers, a block at a time.

Nearly every block takes the fast path: pyarrow's CSV reader straight to numbers. A block it refuses, or that holds any
byte a number cannot have, is split by hand, field by field but still as whole columns, to find the rows to blame.
"""

from dataclasses import dataclass

import numpy as np

from intbmoe.tasks.travel.tables import BadRows, Block, TableFile

MISSING = np.iinfo(np.int64).min
"""Stands for an empty field in a column of whole numbers; in a decimal column it is NaN."""
WHOLE_NUMBER = r"^-?[0-9]{1,18}$"
DECIMAL_NUMBER = r"^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$"
BYTES_OF_WHOLE, BYTES_OF_DECIMAL = b"0123456789-\t\n", b"0123456789-+.eE\t\n"
LONGEST_QUOTE = 40


@dataclass(frozen=True)
class Rows:
    """Well-formed rows of a block."""

    number: np.ndarray
    """(N,): the number of each row in its file."""
    columns: dict[str, np.ndarray]
    """(N,) each: int64, decimals float32, text as pyarrow's binary array."""

    def keep(self, good: np.ndarray) -> "Rows":
        """The rows where ``good`` is true."""
        if good.all():
            return self
        return Rows(self.number[good], {name: column[good] for name, column in self.columns.items()})


def parse(file: TableFile, block: Block, first_row: int, bad: BadRows) -> Rows:
    """The rows of ``block``, the first of which is row ``first_row`` of the file."""
    lines = block.text.count(b"\n")
    columns = None if file.table.text else _parse_fast(file, block.text, lines)
    if columns is None:
        rows = _parse_slowly(file, block.text, first_row, bad) if lines else _no_rows(file)
    else:
        rows = Rows(np.arange(first_row, first_row + lines), columns)
    if block.cut:
        where = file.where(first_row + lines)
        message = (
            f"{where}: the file is cut off here ({block.cut}): get it again, or end its last row with a line break"
        )
        bad.report(f"{file.table.name}: file cut off", message)
    return _require_fields(file, rows, bad)


def check(file: TableFile, rows: Rows, field: str, wrong: np.ndarray, kind: str, what: str, bad: BadRows) -> Rows:
    """Report the rows that are ``wrong`` (a kind of mistake, ``what`` says it in words) and give the others."""
    number = int(wrong.sum())
    if number:
        first = int(wrong.argmax())
        value = rows.columns[field][first]
        shown = "an empty field" if value == MISSING or np.isnan(value) else value
        bad.report(f"{file.table.name}: {kind}", f"{file.where(rows.number[first], field)}: {shown} {what}", number)
    return rows.keep(~wrong)


def _require_fields(file: TableFile, rows: Rows, bad: BadRows) -> Rows:
    for field in file.table.required:
        column = rows.columns[field]
        empty = np.isnan(column) if field in file.table.decimal else column == MISSING
        rows = check(file, rows, field, empty, "empty field", "where a value is needed", bad)
    return rows


def _parse_fast(file: TableFile, text: bytes, lines: int) -> dict[str, np.ndarray] | None:
    """Columns, or None if any row is or may be malformed."""
    import pyarrow as pa
    from pyarrow import csv

    allowed = BYTES_OF_DECIMAL if file.table.decimal else BYTES_OF_WHOLE
    # pyarrow also takes hexadecimal numbers and blanks around numbers, and reads an empty line as a row of nothing
    if not lines or text.translate(None, allowed) or text.startswith(b"\n") or b"\n\n" in text:
        return None
    types = {name: pa.float32() if name in file.table.decimal else pa.int64() for name in file.table.columns}
    try:
        table = csv.read_csv(
            pa.BufferReader(text),
            csv.ReadOptions(column_names=list(file.columns)),
            csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(column_types=types, null_values=[""], include_columns=list(file.table.columns)),
        )
    except pa.ArrowInvalid:
        return None
    if table.num_rows != lines:
        return None
    return {
        name: column.fill_null(np.nan if name in file.table.decimal else MISSING).to_numpy()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _no_rows(file: TableFile) -> Rows:
    kinds = {name: np.float32 if name in file.table.decimal else np.int64 for name in file.table.columns}
    return Rows(np.empty(0, np.int64), {name: np.empty(0, kind) for name, kind in kinds.items()})


def _parse_slowly(file: TableFile, text: bytes, first_row: int, bad: BadRows) -> Rows:
    import pyarrow as pa
    import pyarrow.compute as pc

    fields = pc.split_pattern(pc.split_pattern(pa.array([text[:-1]], pa.large_binary()), "\n").flatten(), "\t")
    number = np.arange(first_row, first_row + len(fields))
    expected = len(file.columns)
    lengths = pc.list_value_length(fields).to_numpy()
    for wrong, kind in ((lengths < expected, "missing column"), (lengths > expected, "extra column")):
        if wrong.any():
            row = int(wrong.argmax())
            field = f"field {file.columns[lengths[row]]} is missing" if kind == "missing column" else "extra field"
            message = f"{file.where(number[row])}, {field}: {lengths[row]} fields, expected {expected}"
            bad.report(f"{file.table.name}: {kind}", message, int(wrong.sum()))
    whole = lengths == expected
    flat = fields.filter(pa.array(whole)).flatten()
    rows = Rows(number[whole], {})
    wrong = np.zeros(len(rows.number), bool)
    for name in file.table.columns:
        column = flat.take(pa.array(np.arange(file.columns.index(name), len(flat), expected)))
        if name in file.table.text:
            rows.columns[name] = np.array(column.to_pylist(), object)
            continue
        rows.columns[name], unread = to_numbers(column, decimal=name in file.table.decimal)
        if (unread & ~wrong).any():
            row = int((unread & ~wrong).argmax())
            message = f"{file.where(rows.number[row], name)}: {quote(column[row].as_py())} is not a number"
            bad.report(f"{file.table.name}: not a number", message, int((unread & ~wrong).sum()))
            wrong |= unread
    return rows.keep(~wrong)


def to_numbers(column, *, decimal: bool) -> tuple[np.ndarray, np.ndarray]:
    """A binary array as int64 or float32, and which of its entries are not such numbers; empty ones are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = pa.float32() if decimal else pa.int64()
    readable = pc.match_substring_regex(column, DECIMAL_NUMBER if decimal else WHOLE_NUMBER)
    text = pc.cast(pc.if_else(readable, column, pa.scalar(None, column.type)), pa.large_string())
    numbers = pc.cast(text, kind).fill_null(np.nan if decimal else MISSING).to_numpy(zero_copy_only=False).copy()
    unread = ~readable.to_numpy(zero_copy_only=False) & (pc.binary_length(column).to_numpy() > 0)
    for row in np.flatnonzero(unread):  # numbers written in an unusual way, such as with 19 digits
        number = _unusual_number(column[int(row)].as_py(), decimal)
        if number is not None:
            numbers[row], unread[row] = number, False
    return numbers, unread


def _unusual_number(text: bytes, decimal: bool) -> float | int | None:
    if text.translate(None, BYTES_OF_DECIMAL if decimal else BYTES_OF_WHOLE):
        return None
    try:
        number = float(text) if decimal else int(text)
    except ValueError:
        return None
    limit = np.finfo(np.float32).max if decimal else -(MISSING + 1)
    return number if abs(number) <= limit else None


def quote(text: bytes) -> str:
    """A field for a message, not too long."""
    shown = text.decode(errors="replace")
    return repr(shown if len(shown) <= LONGEST_QUOTE else shown[:LONGEST_QUOTE] + "…")
