"""Actions and profiles, read once: in chunks of rows grouped by shard, each kept on disk as a parquet file.

A shard later reads one slice of each chunk, for which parquet's statistics of row groups are enough. Fields that will
be codes keep their values: the codes are known only after the last row of the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intbmoe.tasks.preparation import Progress
from intbmoe.tasks.travel.duck import FILE_BITS, Reader, keep, kept, literal, report_cut, where
from intbmoe.tasks.travel.tables import POI_INFO, PROFILE_COLUMNS, BadRows, Chunk, TableFile

ROW_GROUP = (2048, 122_880)
"""DuckDB's smallest and default row groups of a parquet file."""
SHARD_OF = f"""
CREATE MACRO low(x) AS (x & {2**64 - 1}::HUGEINT)::UBIGINT;
CREATE MACRO times(x, y) AS (x::UHUGEINT * y & {2**64 - 1}::UHUGEINT)::UBIGINT;
CREATE MACRO fold(x) AS xor(x, x >> 32);
CREATE MACRO shard_of(user, shards) AS
    (fold(times(fold(times(low(user::HUGEINT), {0x9E3779B97F4A7C15})), {0xD6E8FEB86659FD93})) % shards)::INTEGER
"""
"""The shard of a user is the same whatever else is in the table; user numbers are mixed well first."""


@dataclass(frozen=True)
class Layout:
    """How rows of a table are kept: with their shard and number, ``plain`` columns, and those that become codes."""

    plain: Mapping[str, str]
    """Name → SQL."""
    coded: Mapping[str, str]
    """Name → column."""
    wrong: Mapping[str, tuple[str, str, str]]
    """SQL that is true of rows to be left out → (the column to blame, kind of mistake, the same in words)."""
    joins: str = ""
    """Other tables that ``plain`` and ``wrong`` ask."""

    def select(self, rows: str, required: Sequence[str], shards: int, position: int) -> str:
        """SQL for the rows of a file, grouped by shard.

        The shard of one to be left out is −1, −2, … by the mistake, and of one that lacks what is required NULL.
        """
        cases = [f"WHEN {name} IS NULL THEN NULL" for name in required]
        cases += [f"WHEN {condition} THEN {-number}" for number, condition in enumerate(self.wrong, 1)]
        blamed = [f"WHEN {-number} THEN {column}" for number, (column, *_) in enumerate(self.wrong.values(), 1)]
        columns = {
            "shard": f"CASE {' '.join(cases)} ELSE shard_of(user_id, {shards}) END",
            "number": f"{position << FILE_BITS} + row",
            "blamed": f"CASE shard {' '.join(blamed)} END::BIGINT" if blamed else "NULL::BIGINT",
            **self.plain,
            **{name: f"rows.{column}" for name, column in self.coded.items()},
        }
        selected = ", ".join(f"{expression} AS {name}" for name, expression in columns.items())
        return f"SELECT {selected} FROM {rows} AS rows {self.joins} ORDER BY shard"


UNKNOWN = ("unknown place", f"is not a place of {POI_INFO.name}")
ACTIONS = Layout(
    plain={
        "user_id": "user_id",
        "time": "timestamp",
        "place": "coalesce(there.place, -1)",
        "via": "coalesce(through.place, -1)",
    },
    coded={
        "action": "action_type",
        "cell": "geographic_id",
        "region": "administrative_region_id",
        "weather": "weather",
        "mode": "travel_mode",
    },
    wrong={
        "timestamp < 0": ("timestamp", "negative timestamp", "is negative"),
        "rows.poi_id IS NOT NULL AND there.place IS NULL": ("rows.poi_id", *UNKNOWN),
        "via_poi_id IS NOT NULL AND through.place IS NULL": ("via_poi_id", *UNKNOWN),
    },
    joins="LEFT JOIN places there ON rows.poi_id = there.poi_id LEFT JOIN places through ON via_poi_id = through.poi_id",
)
PROFILES = Layout(
    plain={"user_id": "user_id"},
    coded={f"profile_{number}": column for number, column in enumerate(PROFILE_COLUMNS, 1)},
    wrong={},
)


def parquet(files: Sequence[Path]) -> str:
    """SQL for the rows of files, in their order."""
    return f"read_parquet([{', '.join(map(literal, files))}])"


@dataclass(frozen=True)
class Spill:
    """How a table becomes chunks on disk."""

    reader: Reader
    folder: Path
    layout: Layout
    shards: int
    depends_on: Any
    """What else makes finished chunks worthless when it changes."""

    def run(self, files: Sequence[TableFile], bad: BadRows, progress: Progress) -> tuple[list[Path], int]:
        """The files of all chunks and how many rows they have; those that are there already are not made again."""
        sizes = [file.path.stat().st_size for file in files]
        made, rows = [], 0
        for position, file in enumerate(files):
            stamp = [file.stamp(), position, self.shards, self.depends_on]
            end, next_row, number, last, chunks = file.start, file.first_row, 0, False, None
            while not last:
                to = self.folder / file.path.name / f"{number:06d}.parquet"
                note = kept(to, stamp, skip_bad=bad.skip)
                if note is not None and note["start"] == end:
                    chunks = None
                else:
                    chunks = chunks or self.reader.chunks(file, end, next_row)
                    note = self._keep(next(chunks), files, position, to, stamp, bad.skip)
                end, next_row, number, last = note["end"], note["next_row"], number + 1, note["last"]
                made.append(to)
                rows += note["rows"]
                bad.counts.update(note["bad"])
                done = sizes[position] if last else min(end, sizes[position])
                progress(f"reading {file.table.name} (bytes)", sum(sizes[:position]) + done, sum(sizes))
        return made, rows

    def _keep(
        self, chunk: Chunk, files: Sequence[TableFile], position: int, to: Path, stamp: Any, skip_bad: bool
    ) -> dict[str, Any]:
        bad, made = BadRows(skip_bad), self.reader.temporary / "chunk.parquet"
        found = self._read_plain(chunk, position, made) if chunk.plain else None
        if found is None:
            found = self._write(chunk, self.reader.mended(chunk, bad), position, made)
        for kind, number, first, value in found:
            if kind < 0:
                column, name, what = list(self.layout.wrong.values())[-kind - 1]
                field = column.removeprefix("rows.")
                message = f"{where(files, first, field)}: {value} {what}"
                bad.report(f"{chunk.file.table.name}: {name}", message, number)
        report_cut(chunk, bad)
        span = {"start": chunk.start, "end": chunk.end, "next_row": chunk.first_row + chunk.rows, "last": chunk.last}
        rows = sum(number for kind, number, *_ in found if kind == 0)
        note = {"stamp": stamp, **span, "rows": rows, "bad": dict(bad.counts)}
        keep(made, to, note)
        return note

    def _read_plain(self, chunk: Chunk, position: int, to: Path) -> list[tuple] | None:
        """What ``_write`` found, or None if any row is malformed."""
        import duckdb

        try:
            found = self._write(chunk, self.reader.as_it_is(chunk), position, to)
        except (duckdb.ConversionException, duckdb.InvalidInputException):
            return None
        whole = all(kind is not None for kind, *_ in found) and sum(number for _, number, *_ in found) == chunk.rows
        return found if whole else None

    def _write(self, chunk: Chunk, rows: str, position: int, to: Path) -> list[tuple]:
        """(shard if negative, else 0; number of rows; number of the first; its value to blame), by the first."""
        execute = self.reader.connection.execute
        select = self.layout.select(rows, chunk.file.table.required, self.shards, position)
        smallest, largest = ROW_GROUP
        size = min(max(chunk.rows // self.shards, smallest), largest)
        execute(f"COPY ({select}) TO {literal(to)} (FORMAT parquet, ROW_GROUP_SIZE {size})")
        return execute(
            "SELECT CASE WHEN shard > 0 THEN 0 ELSE shard END AS kind, count(*), min(number), arg_min(blamed, number) "
            f"FROM {parquet([to])} GROUP BY kind ORDER BY min(number)"
        ).fetchall()
