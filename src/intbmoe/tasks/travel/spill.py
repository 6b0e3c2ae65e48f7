"""Actions and profiles, read once: in chunks of rows grouped by shard, each kept on disk as a parquet file.

A shard later reads one slice of each chunk, for which parquet's statistics of row groups are enough. Fields that will
be codes keep their values: the codes are known only after the last row of the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intbmoe.tasks.preparation import Progress
from intbmoe.tasks.travel.duck import FILE_BITS, ROW_MASK, Reader, keep, kept, literal, report_cut
from intbmoe.tasks.travel.tables import POI_INFO, PROFILE_COLUMNS, USER_ACTION, USER_PROFILE, BadRows, Chunk, TableFile

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


CODED = {
    USER_ACTION.name: ("action", "cell", "region", "weather", "mode"),
    USER_PROFILE.name: tuple(f"profile_{number}" for number in range(1, len(PROFILE_COLUMNS) + 1)),
}
"""Fields that become codes."""
SELECT = {
    USER_ACTION.name: """
        SELECT CASE WHEN user_id IS NULL OR timestamp IS NULL THEN NULL
                    WHEN timestamp < 0 THEN -1
                    WHEN rows.poi_id IS NOT NULL AND there.place IS NULL THEN -2
                    WHEN via_poi_id IS NOT NULL AND through.place IS NULL THEN -3
                    ELSE shard_of(user_id, {shards}) END AS shard,
               {before} + row AS number, user_id, timestamp AS time,
               coalesce(there.place, -1) AS place, coalesce(through.place, -1) AS via, action_type AS action,
               rows.geographic_id AS cell, rows.administrative_region_id AS region, weather, travel_mode AS mode
        FROM {rows} AS rows
        LEFT JOIN places there ON rows.poi_id = there.poi_id LEFT JOIN places through ON via_poi_id = through.poi_id
        ORDER BY shard""",
    USER_PROFILE.name: f"""
        SELECT shard_of(user_id, {{shards}}) AS shard, {{before}} + row AS number, user_id,
               {", ".join(f"profile_feature_{number} AS profile_{number}" for number in range(1, 7))}
        FROM {{rows}} ORDER BY shard""",
}
"""Rows grouped by shard. It is NULL if a field is empty that must not be, and negative for what ``BLAMED`` says."""
BLAMED = {
    -1: ("timestamp", "negative timestamp", "is negative"),
    -2: ("poi_id", "unknown place", f"is not a place of {POI_INFO.name}"),
    -3: ("via_poi_id", "unknown place", f"is not a place of {POI_INFO.name}"),
}


def parquet(files: Sequence[Path]) -> str:
    """SQL for the rows of files, in their order."""
    return f"read_parquet([{', '.join(map(literal, files))}])"


@dataclass(frozen=True)
class Spill:
    """How a table becomes chunks on disk."""

    reader: Reader
    folder: Path
    shards: int
    depends_on: Any
    """What else makes finished chunks worthless when it changes."""

    def run(self, files: Sequence[TableFile], bad: BadRows, progress: Progress) -> tuple[list[Path], int]:
        """The files of all chunks and how many rows they have; those that are there already are not made again."""
        sizes = [file.path.stat().st_size for file in files]
        kept_files, rows = [], 0
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
                    made = self.reader.temporary / "chunk.parquet"
                    note = {"stamp": stamp, **self._make(next(chunks), position, made, bad.skip)}
                    keep(made, to, note)
                end, next_row, number, last = note["end"], note["next_row"], number + 1, note["last"]
                kept_files.append(to)
                rows += note["rows"]
                bad.counts.update(note["bad"])
                done = sizes[position] if last else min(end, sizes[position])
                progress(f"reading {file.table.name} (bytes)", sum(sizes[:position]) + done, sum(sizes))
        return kept_files, rows

    def _make(self, chunk: Chunk, position: int, to: Path, skip_bad: bool) -> dict[str, Any]:
        """Write the rows of ``chunk`` and say what they are."""
        bad, table = BadRows(skip_bad), chunk.file.table
        rows = self.reader.as_it_is(chunk)
        found = self._write_plain(chunk, rows, position, to) if chunk.plain else None
        if found is None:
            rows = self.reader.mended(chunk, bad)
            found = self._write(chunk, rows, position, to)
        for shard, number, first in found:
            if shard < 0:
                field, kind, what = BLAMED[shard]
                row = first & ROW_MASK
                (value,) = self.reader.connection.execute(f"SELECT {field} FROM {rows} WHERE row = {row}").fetchone()
                bad.report(f"{table.name}: {kind}", f"{chunk.file.where(row, field)}: {value} {what}", number)
        report_cut(chunk, bad)
        span = {"start": chunk.start, "end": chunk.end, "next_row": chunk.first_row + chunk.rows, "last": chunk.last}
        return {**span, "rows": sum(number for shard, number, _ in found if shard == 0), "bad": dict(bad.counts)}

    def _write_plain(self, chunk: Chunk, rows: str, position: int, to: Path) -> list[tuple] | None:
        """What ``_write`` found, or None if any row is malformed."""
        import duckdb

        try:
            found = self._write(chunk, rows, position, to)
        except (duckdb.ConversionException, duckdb.InvalidInputException):
            return None
        whole = all(shard is not None for shard, *_ in found) and sum(number for _, number, _ in found) == chunk.rows
        return found if whole else None

    def _write(self, chunk: Chunk, rows: str, position: int, to: Path) -> list[tuple]:
        """(0 for all shards, or what is wrong; how many rows; the number of the first), in the order of the first."""
        execute = self.reader.connection.execute
        select = SELECT[chunk.file.table.name].format(shards=self.shards, before=position << FILE_BITS, rows=rows)
        smallest, largest = ROW_GROUP
        size = min(max(chunk.rows // self.shards, smallest), largest)
        execute(f"COPY ({select}) TO {literal(to)} (FORMAT parquet, ROW_GROUP_SIZE {size})")
        return execute(
            "SELECT CASE WHEN shard > 0 THEN 0 ELSE shard END AS kind, count(*), min(number) "
            f"FROM {parquet([to])} GROUP BY kind ORDER BY min(number)"
        ).fetchall()
