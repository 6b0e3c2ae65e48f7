"""Actions and profiles, read once: in chunks, each kept on disk as arrays whose rows are grouped by shard.

A shard later reads one slice of each chunk. Fields that will be codes keep their values, and the chunk lists those it
has: the codes are known only after the last row of the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.preparation import Progress
from intbmoe.tasks.travel.rows import FILE_BITS, MISSING, Reader, find
from intbmoe.tasks.travel.store import NOTE, read_json, write_folder
from intbmoe.tasks.travel.tables import POI_INFO, PROFILE_COLUMNS, USER_ACTION, USER_PROFILE, BadRows, Chunk, TableFile

PLAIN = {USER_ACTION.name: ("user_id", "timestamp", "poi_id", "via_poi_id"), USER_PROFILE.name: ("user_id", "number")}
"""Columns kept as they are. Rows are sorted by the first two."""
CODED = {
    USER_ACTION.name: {
        "action": "action_type",
        "cell": "geographic_id",
        "region": "administrative_region_id",
        "weather": "weather",
        "mode": "travel_mode",
    },
    USER_PROFILE.name: {f"profile_{number}": name for number, name in enumerate(PROFILE_COLUMNS, 1)},
}
"""Columns that become codes, by the name of the field. In ``rows`` of a chunk they follow those of ``PLAIN``."""


@dataclass(frozen=True)
class Spill:
    """How a table becomes chunks on disk."""

    reader: Reader
    folder: Path
    shards: int
    ids: np.ndarray
    """Of places, ascending."""
    depends_on: Any
    """What else makes finished chunks worthless when it changes."""

    def run(self, files: Sequence[TableFile], bad: BadRows, progress: Progress) -> tuple[list[Path], int]:
        """The folders of all chunks and how many rows they have; those that are there already are not made again."""
        sizes = [file.path.stat().st_size for file in files]
        folders, rows = [], 0
        for position, file in enumerate(files):
            stamp = [file.stamp(), position, self.shards, self.depends_on]
            end, next_row, number, last, chunks = file.start, file.first_row, 0, False, None
            while not last:
                folder = self.folder / file.path.name / f"{number:06d}"
                note = read_note(folder, stamp, skip_bad=bad.skip)
                if note is not None and note["start"] == end:
                    chunks = None
                else:
                    chunks = chunks or self.reader.chunks(file, end, next_row)
                    note = self._make(next(chunks), position, folder, stamp, bad.skip)
                end, next_row, number, last = note["end"], note["next_row"], number + 1, note["last"]
                folders.append(folder)
                rows += note["rows"]
                bad.counts.update(note["bad"])
                done = sizes[position] if last else min(end, sizes[position])
                progress(f"reading {file.table.name} (bytes)", sum(sizes[:position]) + done, sum(sizes))
        return folders, rows

    def _make(self, chunk: Chunk, position: int, folder: Path, stamp: Any, skip_bad: bool) -> dict[str, Any]:
        """Write the rows of ``chunk`` and say what they are."""
        bad, table = BadRows(skip_bad), chunk.file.table
        columns = self.reader.read(chunk, bad)
        if table is USER_ACTION:
            columns = _with_places(columns, self.ids, chunk.file, bad)
        else:
            columns["number"] = columns["row"] + (position << FILE_BITS)
        chunk.report_cut(bad)
        span = {"start": chunk.start, "end": chunk.end, "next_row": chunk.first_row + chunk.rows, "last": chunk.last}
        note = {"stamp": stamp, **span, "rows": len(columns["row"]), "bad": dict(bad.counts)}
        write_folder(folder, self._arrange(table.name, columns), note)
        return note

    def _arrange(self, table: str, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of a chunk: ``rows`` (columns × rows), where those of each shard start, and values of fields."""
        shard = shard_of(columns["user_id"], self.shards)
        order = np.argsort(shard, kind="stable")
        names = (*PLAIN[table], *CODED[table].values())
        rows = np.empty((len(names), len(order)), np.int64)
        for row, name in zip(rows, names, strict=True):
            np.take(columns[name], order, out=row, mode="clip")  # no index is out of bounds; other modes make a copy
        starts = np.concatenate([[0], np.cumsum(np.bincount(shard, minlength=self.shards))])
        values = {name: self.reader.distinct(columns[column]) for name, column in CODED[table].items()}
        return {"rows": rows, "starts": starts, **values}


def read_note(folder: Path, stamp: Any, *, skip_bad: bool) -> dict[str, Any] | None:
    """What was noted when ``folder`` was made with the same ``stamp``; None if it must be made (again)."""
    note = read_json(folder / NOTE)
    return note if note is not None and note["stamp"] == stamp and (skip_bad or not note["bad"]) else None


def _with_places(
    columns: dict[str, np.ndarray], ids: np.ndarray, file: TableFile, bad: BadRows
) -> dict[str, np.ndarray]:
    """The rows that make sense, with the row among ``ids`` for each place, −1 for none."""
    found = {name: find(ids, columns[name]) for name in ("poi_id", "via_poi_id")}
    found = {name: np.where(there, row, -1) for name, (row, there) in found.items()}
    checks = [("timestamp", columns["timestamp"] < 0, "negative timestamp", "is negative")]
    for name, place in found.items():
        unknown = (place < 0) & (columns[name] != MISSING)
        checks.append((name, unknown, "unknown place", f"is not a place of {POI_INFO.name}"))
    good, mistakes = np.ones(len(columns["row"]), bool), []
    for name, wrong, kind, what in checks:
        wrong &= good
        if wrong.any():
            first = int(wrong.argmax())
            message = f"{file.where(columns['row'][first], name)}: {columns[name][first]} {what}"
            mistakes.append((first, f"{file.table.name}: {kind}", message, int(wrong.sum())))
            good &= ~wrong
    for _, *mistake in sorted(mistakes):
        bad.report(*mistake)
    columns |= found
    return {name: column[good] for name, column in columns.items()} if mistakes else columns


def shard_of(user: np.ndarray, shards: int) -> np.ndarray:
    """The shard of each user, the same whatever else is in the table; user numbers are mixed well first."""
    mixed = user.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    shard = mixed % np.uint64(shards)
    return shard.astype(np.uint16 if shards <= 1 << 16 else np.int64)  # 16 bits are sorted in linear time
