"""Actions and profiles, read once: in chunks, each kept on disk as arrays whose rows are grouped by shard.

A shard later reads one slice of each chunk. Fields that will become codes keep their values, and the chunk lists the
values it has: the codes are known only after the last row of the table.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.travel.chunks import Chunk
from intbmoe.tasks.travel.rows import MISSING, Budget, Reader, find
from intbmoe.tasks.travel.store import NOTE, WORK_FORMAT, read_json, write_folder
from intbmoe.tasks.travel.tables import POI_INFO, PROFILE_COLUMNS, USER_ACTION, USER_PROFILE, BadRows, TableFile
from intbmoe.tasks.workers import Progress

PLAIN = {USER_ACTION.name: ("user_id", "timestamp", "poi_id", "via_poi_id"), USER_PROFILE.name: ("user_id", "row")}
"""Columns kept as they are; rows are sorted by the first two."""
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
"""Columns that become codes, by the name of the field. In a chunk's ``rows`` they follow those of ``PLAIN``."""


@dataclass(frozen=True)
class Spill:
    """Reads chunks of a table and keeps them as arrays on disk, in any process."""

    folder: Path
    temporary: Path
    budget: Budget
    shards: int
    place_ids: Path
    """The file of an array, ascending."""
    depends_on: Any
    """What else makes finished chunks invalid when it changes."""
    skip_bad: bool

    def __call__(self, chunk: Chunk, progress: Progress) -> dict[str, Any]:
        """Return what a chunk has; it is made unless it is finished."""
        file, folder = chunk.file, self.folder / chunk.file.path.name / f"{chunk.number:06d}"
        stamp = [WORK_FORMAT, file.stamp(), chunk.start, chunk.first_row, chunk.end, self.shards, self.depends_on]
        note = read_note(folder, stamp, skip_bad=self.skip_bad)
        if note is None:
            bad = BadRows(self.skip_bad)
            with Reader.open(self.temporary, self.budget) as reader:
                columns = reader.read(chunk, bad, progress)
                if file.table == USER_ACTION:
                    columns = _with_places(columns, np.load(self.place_ids, mmap_mode="r"), file, bad)
                arrays = self._arrange(reader, file.table.name, columns)
            note = {"stamp": stamp, "rows": len(columns["row"]), "bad": bad.counts}
            write_folder(folder, arrays, note)
        return {**note, "folder": folder}

    def _arrange(self, reader: Reader, table: str, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a chunk's arrays: ``rows`` (columns × rows), where each shard's start, and the values of fields."""
        shard = shard_of(columns["user_id"], self.shards)
        order = np.argsort(shard, kind="stable")
        names = (*PLAIN[table], *CODED[table].values())
        rows = np.empty((len(names), len(order)), np.int64)
        for row, name in zip(rows, names, strict=True):
            np.take(columns[name], order, out=row, mode="clip")  # no index is out of bounds; other modes would copy
        starts = np.concatenate([[0], np.cumsum(np.bincount(shard, minlength=self.shards))])
        values = {name: reader.distinct(columns[column]) for name, column in CODED[table].items()}
        return {"rows": rows, "starts": starts, **values}


def read_note(folder: Path, stamp: Any, *, skip_bad: bool) -> dict[str, Any] | None:
    """Return the note of ``folder`` if it was made with the same ``stamp``; None if it must be made (again)."""
    note = read_json(folder / NOTE)
    return note if note is not None and note["stamp"] == stamp and (skip_bad or not note["bad"]) else None


def _with_places(
    columns: dict[str, np.ndarray], ids: np.ndarray, file: TableFile, bad: BadRows
) -> dict[str, np.ndarray]:
    """Return the valid rows, with the row among ``ids`` for each place, −1 for none."""
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
    """Return the shard of each user, whatever else is in the table; user numbers are hashed first."""
    mixed = user.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    shard = mixed % np.uint64(shards)
    return shard.astype(np.uint16 if shards <= 1 << 16 else np.int64)  # 16-bit numbers are sorted in linear time
