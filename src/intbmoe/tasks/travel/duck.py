"""IntTravel's tables in DuckDB: a connection within a budget, tables read a chunk at a time, results kept on disk."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intbmoe.tasks.travel.rows import mend
from intbmoe.tasks.travel.store import read_json, write_json
from intbmoe.tasks.travel.tables import NEEDS_DUCKDB, POI_INFO, BadRows, Chunk, TableFile, cut_chunk

FILE_BITS = 40
ROW_MASK = (1 << FILE_BITS) - 1
"""A row's number over all files of a table is (the file's position << FILE_BITS) + its number in the file."""


@dataclass(frozen=True)
class Budget:
    """How much is in memory at a time."""

    memory_bytes: int = 4 << 30
    """DuckDB's; what is more goes to disk. The arrays of one shard come on top of it, some 100 bytes for each row."""
    threads: int | None = None
    """DuckDB's; None for as many as there are cores."""
    chunk_bytes: int = 128 << 20
    """Text that is read together: a twelfth of the memory or less. An interruption costs the work on one chunk."""
    shard_rows: int = 8_000_000
    """Rows that are sorted together, at most about so many."""


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

    def as_it_is(self, chunk: Chunk) -> str:
        """SQL for the rows of a plain chunk, numbered. Reading them fails, or gives fewer, if any is malformed."""
        known = chunk.file.table.columns
        names = [name if name in known else f"unknown_{number}" for number, name in enumerate(chunk.file.columns)]
        rows = _read_csv(chunk.path, dict.fromkeys(names, "BIGINT"))
        return f"(SELECT row_number() OVER () + {chunk.first_row - 1} AS row, {', '.join(known)} FROM {rows})"

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


def literal(path: Path) -> str:
    """In SQL."""
    return "'" + str(path).replace("'", "''") + "'"


def where(files: Sequence[TableFile], number: int, field: str | None = None) -> str:
    """For messages: the row with a number over all files."""
    return files[number >> FILE_BITS].where(number & ROW_MASK, field)


def report_cut(chunk: Chunk, bad: BadRows) -> None:
    """After the rows of the chunk were read."""
    if chunk.cut:
        where = chunk.file.where(chunk.first_row + chunk.rows)
        advice = "get it again, or end its last row with a line break"
        bad.report(
            f"{chunk.file.table.name}: file cut off", f"{where}: the file is cut off here ({chunk.cut}): {advice}"
        )


def keep(made: Path, to: Path, note: Mapping[str, Any]) -> None:
    """Move a finished file to where it is kept. Its note comes last: without it the file does not count."""
    to.parent.mkdir(parents=True, exist_ok=True)
    to.with_suffix(".json").unlink(missing_ok=True)
    os.replace(made, to)
    write_json(to.with_suffix(".json"), note)


def kept(file: Path, stamp: Any, *, skip_bad: bool) -> dict[str, Any] | None:
    """The note of a file that was kept with the same ``stamp``; None if it must be made (again)."""
    note = read_json(file.with_suffix(".json")) if file.exists() else None
    return note if note is not None and note["stamp"] == stamp and (skip_bad or not note["bad"]) else None
