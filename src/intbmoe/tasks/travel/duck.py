"""IntTravel's tables read with DuckDB, a chunk of text at a time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.travel.rows import MISSING, mend
from intbmoe.tasks.travel.tables import NEEDS_DUCKDB, POI_INFO, BadRows, Chunk, TableFile, cut_chunk

FILE_BITS = 40
"""A row's number over all files of a table is (the file's position << FILE_BITS) + its number in the file."""


@dataclass(frozen=True)
class Budget:
    """How much is in memory at a time."""

    memory_bytes: int = 4 << 30
    """DuckDB's; what is more goes to disk. The arrays of one chunk or one shard come on top of it."""
    threads: int | None = None
    """DuckDB's; None for as many as there are cores."""
    chunk_bytes: int = 64 << 20
    """Text that is read together, whose arrays take some five times as much. An interruption costs one chunk."""
    shard_rows: int = 8_000_000
    """Rows that are sorted together, at most about so many, of some 200 bytes each."""


@contextmanager
def connect(temporary: Path, budget: Budget) -> Iterator[Any]:
    """A connection to a database in memory that spills to ``temporary``."""
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NEEDS_DUCKDB) from error
    config = {"memory_limit": f"{budget.memory_bytes >> 20}MiB", "temp_directory": str(temporary)}
    if budget.threads is not None:
        config["threads"] = budget.threads
    with duckdb.connect(config=config) as connection:
        yield connection


@dataclass(frozen=True)
class Reader:
    """Cuts files into chunks, of which one at a time lies in ``temporary`` as text."""

    connection: Any
    temporary: Path
    chunk_bytes: int

    def chunks(self, file: TableFile, start: int, first_row: int) -> Iterator[Chunk]:
        """From byte ``start`` of the text on, where row ``first_row`` begins; at least one."""
        last = False
        with file.open() as stream:
            stream.seek(start)
            while not last:
                chunk = cut_chunk(file, stream, start, first_row, self.chunk_bytes, self.temporary / "chunk.tsv")
                yield chunk
                start, first_row, last = chunk.end, first_row + chunk.rows, chunk.last

    def read(self, chunk: Chunk, bad: BadRows) -> dict[str, np.ndarray]:
        """The good rows of a chunk of whole numbers: their columns, with MISSING for an empty field, and ``row``."""
        columns = self._read_plain(chunk) if chunk.plain else None
        if columns is None:
            columns = self._fetch(self.mended(chunk, bad), ("row", *chunk.file.table.columns))
        return columns

    def _read_plain(self, chunk: Chunk) -> dict[str, np.ndarray] | None:
        """None if any row is malformed: then reading fails, or gives fewer, or leaves a required field empty."""
        import duckdb

        table = chunk.file.table
        names = [f"unknown_{at}" if name not in table.columns else name for at, name in enumerate(chunk.file.columns)]
        try:
            columns = self._fetch(_read_csv(chunk.path, dict.fromkeys(names, "BIGINT")), table.columns)
        except (duckdb.ConversionException, duckdb.InvalidInputException):
            return None
        if len(columns[names[0]]) != chunk.rows or any((columns[name] == MISSING).any() for name in table.required):
            return None
        return columns | {"row": np.arange(chunk.first_row, chunk.first_row + chunk.rows)}

    def _fetch(self, rows: str, names: Sequence[str]) -> dict[str, np.ndarray]:
        return self.connection.execute(f"SELECT {or_missing(names)} FROM {rows}").fetchnumpy()

    def distinct(self, values: np.ndarray) -> np.ndarray:
        """All but MISSING, ascending; by hashing, which is quicker than sorting millions."""
        given = {"value": values}  # noqa: F841 (SQL reads it)
        return np.sort(
            self.connection.execute(
                f"SELECT DISTINCT value FROM given WHERE value != ({MISSING})::BIGINT"
            ).fetchnumpy()["value"]
        )

    def mended(self, chunk: Chunk, bad: BadRows) -> str:
        """SQL for the good rows of any chunk, numbered; of cells, for their places."""
        to = self.temporary / "mended.tsv"
        mend(chunk, to, bad)
        table = POI_INFO if chunk.file.table.text else chunk.file.table
        types = {name: "FLOAT" if name in table.decimal else "BIGINT" for name in ("row", *table.columns)}
        return _read_csv(to, types)


def _read_csv(path: Path, types: Mapping[str, str]) -> str:
    columns = ", ".join(f"'{name}': '{kind}'" for name, kind in types.items())
    options = "auto_detect=false, header=false, delim='\t', quote='', escape='', comment='', nullstr=''"
    buffers = "max_line_size=1_000_000, buffer_size=4_000_000"  # DuckDB's own take 32 MB each
    return f"read_csv({literal(path)}, {options}, {buffers}, columns={{{columns}}})"


def or_missing(names: Iterable[str]) -> str:
    """SQL for columns of whole numbers, with MISSING for an empty field."""
    return ", ".join(f"coalesce({name}, ({MISSING})::BIGINT) AS {name}" for name in names)


def literal(path: Path) -> str:
    """In SQL."""
    return "'" + str(path).replace("'", "''") + "'"


def where(files: Sequence[TableFile], number: int, field: str | None = None) -> str:
    """For messages: the row with a number over all files."""
    return files[number >> FILE_BITS].where(number & ((1 << FILE_BITS) - 1), field)
