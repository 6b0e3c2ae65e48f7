"""IntTravel's raw tables: their columns, the files that hold them, and what is done about malformed rows.

A file may be gzipped (detected by its content) and may begin with a header, recognised by its column names: columns are
then found by name, and others are not read. Without a header the columns are those of ``Table``, in order.
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from intbmoe.tasks.errors import DataError

GZIP = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SUFFIXES = ("", ".tsv", ".txt", ".csv")
FILE_BITS = 40
"""A row's number over all files of a table is (the file's position << FILE_BITS) + its number in the file."""


@dataclass(frozen=True)
class Table:
    """One of the tables; all fields are whole numbers, except ``decimal`` and ``text`` ones."""

    name: str
    columns: tuple[str, ...]
    required: tuple[str, ...]
    """Columns that no row may leave empty."""
    other_names: tuple[str, ...] = ()
    decimal: tuple[str, ...] = ()
    text: tuple[str, ...] = ()


PROFILE_COLUMNS = tuple(f"profile_feature_{number}" for number in range(1, 7))
ACTION_COLUMNS = (
    "user_id timestamp action_type poi_id geographic_id administrative_region_id weather travel_mode via_poi_id"
)
USER_ACTION = Table("user_action", tuple(ACTION_COLUMNS.split()), required=("user_id", "timestamp"))
USER_PROFILE = Table("user_profile", ("user_id", *PROFILE_COLUMNS), required=("user_id",), other_names=("user_info",))
POI_INFO = Table(
    "poi_info",
    ("poi_id", "normalized_score", "geographic_id", "category_id", "administrative_region_id"),
    required=("poi_id", "normalized_score"),
    decimal=("normalized_score",),
)
POI_BY_CELL = Table(
    "poi_info_groupby_geographic", ("geographic_id", "poi_info"), required=("geographic_id",), text=("poi_info",)
)
POI_LOCATION = Table(
    "poi_location",
    ("poi_id", "longitude", "latitude", "name"),
    required=("poi_id",),
    decimal=("longitude", "latitude"),
    text=("name",),
)
"""Not one of IntTravel's four: coordinates in degrees and names of places, any of which may be empty."""
TABLES = (USER_ACTION, USER_PROFILE, POI_INFO, POI_BY_CELL, POI_LOCATION)


class BadRows:
    """Malformed rows: the first one stops the preparation, or all are counted by kind."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.counts: Counter[str] = Counter()

    def report(self, kind: str, message: str, number: int = 1) -> None:
        """Report ``number`` bad rows of a kind; ``message`` describes the first."""
        if not self.skip:
            raise DataError(f"{message}; --skip-bad counts such rows and leaves them out")
        self.counts[kind] += number


@dataclass(frozen=True)
class TableFile:
    """A file of a table, and where its rows begin."""

    path: Path
    table: Table
    columns: tuple[str, ...]
    """All columns of the file, in order, including those of ``table``."""
    start: int
    """Where the first row begins, in bytes of text."""
    first_row: int
    """Its number over all files; within the file it is 2 after a header, otherwise 1."""
    text: Path
    """The file itself, or the file it was unpacked to."""
    cut: str = ""
    """Why not all of it could be unpacked; empty if all was."""

    def stamp(self) -> list[str | int]:
        """Return what changes when the file is replaced or edited."""
        status = self.path.stat()
        return [self.path.name, status.st_size, status.st_mtime_ns]

    def where(self, row: int, field: str | None = None) -> str:
        """Return a row and field for messages."""
        return f"{self.path}, row {row_in_file(row)}" + (f", field {field}" if field else "")


def is_zipped(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(len(GZIP)) == GZIP


def row_in_file(row: int) -> int:
    return int(row) & ((1 << FILE_BITS) - 1)


def where(files: Sequence[TableFile], row: int, field: str | None = None) -> str:
    """Return a row of any of a table's files, for messages."""
    return files[int(row) >> FILE_BITS].where(row, field)


def find_files(source: Path, table: Table) -> list[TableFile]:
    """Return the files of a table in ``source``, by name; empty if there are none."""
    longer = [other.name for other in TABLES if other.name != table.name and other.name.startswith(table.name)]
    names = (table.name, *table.other_names)
    found = [
        path
        for path in sorted(source.iterdir())
        if path.is_file()
        and path.name.startswith(names)
        and not path.name.startswith(tuple(longer))
        and Path(path.name.removesuffix(".gz")).suffix in SUFFIXES
    ]
    return [_look_at(path, table, position << FILE_BITS) for position, path in enumerate(found)]


def _look_at(path: Path, table: Table, before: int) -> TableFile:
    """Find out whether the first row is a header."""
    with (gzip.open if is_zipped(path) else open)(path, "rb") as stream:
        try:
            line = stream.readline()
        except (EOFError, OSError, zlib.error):
            line = b""  # truncated or damaged at the start: reading the rows will say so
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: get it again, or delete it if the table's rows are in other files")
    mark = len(BYTE_ORDER_MARK) if line.startswith(BYTE_ORDER_MARK) else 0
    fields = [field.decode(errors="replace") for field in line[mark:].rstrip(b"\r\n").split(b"\t")]
    if not set(fields) & set(table.columns):
        return TableFile(path, table, table.columns, mark, before + 1, path)
    missing = [column for column in table.columns if column not in fields]
    if missing:
        raise DataError(
            f"{path}, row 1, field {missing[0]}: the header has no such column; "
            f"expected {', '.join(table.columns)}, separated by tabs"
        )
    return TableFile(path, table, tuple(fields), len(line), before + 2, path)
