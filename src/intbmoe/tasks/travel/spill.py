"""Rows of a large table, dealt out to shards by user: read once, in chunks that are kept on disk.

A chunk holds its rows grouped by shard, so that a shard later reads one slice of each chunk. Fields that will be codes
keep their values, and the chunk lists those it has: the codes are known only after the last row of the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.preparation import Progress
from intbmoe.tasks.travel.folders import read_note, write_folder
from intbmoe.tasks.travel.parse import MISSING, Rows, parse
from intbmoe.tasks.travel.tables import BadRows, Block, TableFile, read_blocks


@dataclass(frozen=True)
class Layout:
    """How a row of a table is kept: "user" and other fields that stay as they are, and those that become codes."""

    plain: Mapping[str, tuple[str, str]]
    """Name → (column, type)."""
    coded: Mapping[str, str]
    """Name → column."""

    @property
    def fields(self) -> dict[str, tuple[str, str]]:
        """Name → (column, type) of all."""
        return {**self.plain, **{name: (column, "<i8") for name, column in self.coded.items()}}

    @property
    def dtype(self) -> np.dtype:
        """Of one row."""
        return np.dtype([(name, kind) for name, (_, kind) in self.fields.items()])


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file, on disk."""

    folder: Path
    layout: Layout
    note: Mapping[str, Any]
    """Where in the file it starts and ends, the number of the next row, whether it is the last, rows and bad rows."""

    def values(self, name: str) -> np.ndarray:
        """All values of a field that becomes codes, ascending."""
        return np.load(self.folder / f"{name}.npy")

    @cached_property
    def starts(self) -> np.ndarray:
        """(shards + 1,): where the rows of each shard begin."""
        return np.load(self.folder / "starts.npy")

    def shard(self, number: int) -> np.ndarray:
        """The rows of a shard, in the order of the file."""
        return np.load(self.folder / "rows.npy", mmap_mode="r")[self.starts[number] : self.starts[number + 1]]


@dataclass(frozen=True)
class Spill:
    """How a table becomes chunks."""

    folder: Path
    layout: Layout
    shards: int
    examine: Callable[[TableFile, Rows, BadRows], Rows]
    """Leaves out the rows that are wrong for reasons of this table, and gives its columns their final form."""
    depends_on: Any
    """What else makes finished chunks worthless when it changes."""
    block_bytes: int
    chunk_bytes: int

    def run(self, files: Sequence[TableFile], bad: BadRows, progress: Progress) -> list[Chunk]:
        """All chunks, in the order of the rows; those that are there already are not made again."""
        sizes = [file.path.stat().st_size for file in files]
        chunks = []
        for number, file in enumerate(files):
            for chunk in self._chunks_of(file, bad.skip):
                chunks.append(chunk)
                bad.counts.update(chunk.note["bad"])
                done = sizes[number] if chunk.note["last"] else min(chunk.note["end"], sizes[number])
                progress(f"reading {file.table.name} (bytes)", sum(sizes[:number]) + done, sum(sizes))
        return chunks

    def _chunks_of(self, file: TableFile, skip_bad: bool) -> Iterator[Chunk]:
        stamp = [file.stamp(), self.shards, self.depends_on]
        offset, row, number, blocks, last = file.start, file.first_row, 0, None, False
        while not last:
            folder = self.folder / file.path.name / f"{number:06d}"
            note = read_note(folder, stamp)
            usable = note is not None and note["start"] == offset and (skip_bad or not note["bad"])
            if usable:
                blocks = None
            else:
                blocks = blocks or read_blocks(file, self.block_bytes, offset)
                bad = BadRows(skip_bad)
                rows, note = self._gather(file, blocks, offset, row, bad)
                note = {"stamp": stamp, **note, "bad": dict(bad.counts)}
                write_folder(folder, self._arrange(rows), note)
            yield Chunk(folder, self.layout, note)
            offset, row, number, last = note["end"], note["next_row"], number + 1, note["last"]

    def _gather(
        self, file: TableFile, blocks: Iterator[Block], offset: int, row: int, bad: BadRows
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Good rows of as many blocks as make a chunk, by column, and the chunk's note."""
        start, kept = offset, []
        for block in blocks:
            rows = self.examine(file, parse(file, block, row, bad), bad)
            kept.append({name: rows.columns[column] for name, (column, _) in self.layout.fields.items()})
            offset, row = block.end, row + block.text.count(b"\n")
            if block.last or offset - start >= self.chunk_bytes:
                break
        columns = {name: np.concatenate([part.pop(name) for part in kept]) for name in list(kept[0])}
        rows = len(columns["user"])
        return columns, {"start": start, "end": offset, "next_row": row, "last": block.last, "rows": rows}

    def _arrange(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of a chunk."""
        shard = shard_of(columns["user"], self.shards)
        order = np.argsort(shard, kind="stable")
        rows, values = np.empty(len(order), self.layout.dtype), {}
        for name in self.layout.fields:
            column = columns.pop(name)
            rows[name] = column[order]
            if name in self.layout.coded:
                values[name] = unique(column)
        starts = np.concatenate([[0], np.cumsum(np.bincount(shard, minlength=self.shards))])
        return {"rows": rows, "starts": starts, **values}


def shard_of(user: np.ndarray, shards: int) -> np.ndarray:
    """The shard of each user, the same whatever else is in the table; user numbers are mixed well first."""
    mixed = user.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    shard = mixed % np.uint64(shards)
    return shard.astype(np.uint16 if shards <= 1 << 16 else np.int64)  # 16 bits are sorted in linear time


def unique(column: np.ndarray) -> np.ndarray:
    """The values of a column but MISSING, ascending."""
    import pyarrow as pa

    values = pa.array(column).unique().to_numpy()  # by hashing: quicker than sorting millions
    return np.sort(values[values != MISSING])


def recode(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """int32 codes of ``values`` by the ascending ``known``, among which all are but MISSING: that has code 0."""
    return np.where(values == MISSING, 0, np.searchsorted(known, values) + 1).astype(np.int32)
