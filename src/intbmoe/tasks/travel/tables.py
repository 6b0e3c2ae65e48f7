"""IntTravel's four raw tables: their columns, which files hold them, and blocks of whole rows with exact row numbers.

A file may be gzipped (told by its content) and may begin with a header, recognised by its column names: columns
are then found by name, and others are not read. Without a header the columns are those of ``Table``, in order.
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from intbmoe.tasks.errors import DataError

NEEDS_PYARROW = "preparing IntTravel needs pyarrow: pip install 'intbmoe[travel]'"
GZIP = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SUFFIXES = ("", ".tsv", ".txt", ".csv")


@dataclass(frozen=True)
class Table:
    """One of the tables. All fields are whole numbers, but for ``decimal`` and ``text`` ones."""

    name: str
    columns: tuple[str, ...]
    required: tuple[str, ...]
    """Columns that no row may leave empty."""
    other_names: tuple[str, ...] = ()
    decimal: tuple[str, ...] = ()
    text: tuple[str, ...] = ()


PROFILE_COLUMNS = tuple(f"profile_feature_{number}" for number in range(1, 7))
USER_ACTION = Table(
    "user_action",
    (
        "user_id",
        "timestamp",
        "action_type",
        "poi_id",
        "geographic_id",
        "administrative_region_id",
        "weather",
        "travel_mode",
        "via_poi_id",
    ),
    required=("user_id", "timestamp"),
)
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
TABLES = (USER_ACTION, USER_PROFILE, POI_INFO, POI_BY_CELL)


class BadRows:
    """Malformed rows: the first one stops everything, or all are counted by their kind."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.counts: Counter[str] = Counter()

    def report(self, kind: str, message: str, number: int = 1) -> None:
        """There are ``number`` bad rows of a kind; ``message`` describes the first."""
        if not self.skip:
            raise DataError(f"{message}; --skip-bad counts such rows and leaves them out")
        self.counts[kind] += number


@dataclass(frozen=True)
class TableFile:
    """A file of a table and where its rows begin."""

    path: Path
    table: Table
    columns: tuple[str, ...]
    """All columns of the file, in order; those of ``table`` are among them."""
    start: int
    """Where the first row begins, in bytes of text."""
    first_row: int
    """Its number in the file: 2 after a header, else 1."""

    @property
    def zipped(self) -> bool:
        """Whether it is gzipped."""
        with self.path.open("rb") as handle:
            return handle.read(len(GZIP)) == GZIP

    def stamp(self) -> list[str | int]:
        """What changes when the file is exchanged or edited."""
        status = self.path.stat()
        return [self.path.name, status.st_size, status.st_mtime_ns]

    def where(self, row: int, field: str | None = None) -> str:
        """For messages."""
        return f"{self.path}, row {row}" + (f", field {field}" if field else "")


@dataclass(frozen=True)
class Block:
    """Whole rows, each with its line break."""

    text: bytes
    end: int
    """Where the next block begins, in bytes of the file's text."""
    last: bool
    cut: str = ""
    """Why the file is thought to end in the middle of a row, after this block; empty if it does not."""


def find_files(source: Path, table: Table) -> list[TableFile]:
    """The files of a table in ``source``, by name; empty if there is none."""
    longer = [other.name for other in TABLES if other.name != table.name and other.name.startswith(table.name)]
    names = (table.name, *table.other_names)
    return [
        open_table_file(path, table)
        for path in sorted(source.iterdir())
        if path.is_file()
        and path.name.startswith(names)
        and not path.name.startswith(tuple(longer) or ("\0",))
        and Path(path.name.removesuffix(".gz")).suffix in SUFFIXES
    ]


def open_table_file(path: Path, table: Table) -> TableFile:
    """Look at the first row: is it a header?"""
    with _open(path) as stream:
        try:
            line = stream.readline()
        except (EOFError, OSError, zlib.error):
            line = b""  # cut or damaged at once: reading the rows will say so
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: get it again, or delete it if the table's rows are in other files")
    mark = len(BYTE_ORDER_MARK) if line.startswith(BYTE_ORDER_MARK) else 0
    fields = [field.decode(errors="replace") for field in line[mark:].rstrip(b"\r\n").split(b"\t")]
    if not set(fields) & set(table.columns):
        return TableFile(path, table, table.columns, mark, 1)
    missing = [column for column in table.columns if column not in fields]
    if missing:
        raise DataError(
            f"{path}, row 1, field {missing[0]}: the header has no such column; "
            f"expected {', '.join(table.columns)}, separated by tabs"
        )
    return TableFile(path, table, tuple(fields), len(line), 2)


def read_blocks(file: TableFile, size: int, offset: int) -> Iterator[Block]:
    """Blocks of about ``size`` bytes from ``offset`` on, at least one; a row longer than that makes a longer block."""
    with _open(file.path) as stream:
        rest, problem = b"", _skip(stream, offset)
        while not problem:
            data, problem = _read(stream, size)
            ended = len(data) < size
            rest += data
            whole = rest.rfind(b"\n") + 1
            text, rest = rest[:whole], rest[whole:]
            offset += whole
            if ended:
                problem = problem or ("it does not end with a line break" if rest else "")
                yield Block(text.replace(b"\r\n", b"\n"), offset, True, problem)
                return
            if text:
                yield Block(text.replace(b"\r\n", b"\n"), offset, False)
        yield Block(b"", offset, True, problem)


def _open(path: Path) -> BinaryIO:
    handle = path.open("rb")
    zipped = handle.read(2) == GZIP
    handle.seek(0)
    return gzip.GzipFile(fileobj=handle) if zipped else handle


def _skip(stream: BinaryIO, offset: int) -> str:
    try:
        stream.seek(offset)
    except (EOFError, OSError, zlib.error) as error:
        return str(error)
    return ""


def _read(stream: BinaryIO, size: int) -> tuple[bytes, str]:
    """Exactly ``size`` bytes, or all up to the end or to where the gzip stream breaks, and why it breaks."""
    parts, wanted = [], size
    while wanted:
        try:
            part = stream.read1(wanted)
        except (EOFError, OSError, zlib.error) as error:
            return b"".join(parts), str(error)
        if not part:
            break
        parts.append(part)
        wanted -= len(part)
    return b"".join(parts), ""
