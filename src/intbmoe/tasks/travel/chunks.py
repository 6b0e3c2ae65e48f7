"""Tables in chunks of whole rows, which several workers can read.

A row's number in its file must be known, for messages and because the first of two profiles counts. So line breaks are
counted first, which takes far less time than parsing. A gzipped file can only be read from the beginning, so it is
unpacked first.
"""

import gzip
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

from intbmoe.files import private_folder
from intbmoe.tasks.travel.store import read_json, write_json
from intbmoe.tasks.travel.tables import TableFile
from intbmoe.tasks.workers import Progress, Workers

BLOCK = 1 << 24  # bytes to unpack, or to count lines in, at a time


@dataclass(frozen=True)
class Chunk:
    file: TableFile
    number: int
    """Within its file."""
    start: int
    """Where its first row begins, in bytes of the file's text."""
    first_row: int
    end: int | None = None
    """Where the next chunk begins; None for the last."""

    def read(self) -> tuple[bytes, str]:
        """Return its whole rows, each ended by a line feed, and why the file seems to end within a row, if it does."""
        with self.file.text.open("rb") as stream:
            stream.seek(self.start)
            text = stream.read(-1 if self.end is None else self.end - self.start)
        whole = text.rfind(b"\n") + 1
        cut = self.file.cut if self.end is None else ""
        if whole < len(text):
            cut = cut or "it does not end with a line break"
        return text[:whole].replace(b"\r\n", b"\n"), cut


@dataclass(frozen=True)
class Unpacker:
    """Unpacks gzipped files, in any process."""

    folder: Path

    def __call__(self, file: TableFile, progress: Progress) -> TableFile:
        """Return the file with its text, unpacked as far as possible; an existing text is not unpacked again."""
        text, receipt, stamp = self.folder / file.path.name, self.folder / f"{file.path.name}.json", file.stamp()
        done = read_json(receipt)
        if done is None or done["stamp"] != stamp:
            done = {"stamp": stamp, "cut": ""}
            # In its own folder: a machine that was given up may still be writing the same text.
            with private_folder(self.folder, f".{file.path.name}.", ".part") as own:
                with gzip.open(file.path) as packed, (own / "text").open("wb") as unpacked:
                    while block := _read_block(packed, done):
                        unpacked.write(block)
                os.replace(own / "text", text)
            write_json(receipt, done)
        progress("unpacking (bytes)", text.stat().st_size, None)
        return replace(file, text=text, cut=done["cut"])


def _read_block(packed: gzip.GzipFile, done: dict[str, Any]) -> bytes:
    """Return the next block; empty at the end, and where the file is cut off or damaged, which is recorded."""
    try:
        return packed.read1(BLOCK)
    except (EOFError, OSError, zlib.error) as error:
        done["cut"] = str(error)
        return b""


def divide(file: TableFile, size: int, kept: Path, workers: Workers, progress: Progress) -> list[Chunk]:
    """Return chunks of about ``size`` bytes; the row counts are kept in the file ``kept``."""
    stamp, known = [file.stamp(), size], read_json(kept)
    if known is None or known["stamp"] != stamp:
        starts = _find_starts(file, size)
        spans = [(file.text, start, end) for start, end in pairwise(starts)]
        rows = workers.run(f"counting rows of {file.path.name} (chunks)", count_lines, spans, progress)
        known = {"stamp": stamp, "starts": starts, "rows": rows}
        write_json(kept, known)
    first_rows = accumulate(known["rows"], initial=file.first_row)
    ends: Sequence[int | None] = [*known["starts"][1:], None]
    return [Chunk(file, *place) for place in zip(count(), known["starts"], first_rows, ends, strict=False)]


def _find_starts(file: TableFile, size: int) -> list[int]:
    """Return where rows begin: the first, and then the next one after each ``size`` bytes."""
    starts, total = [file.start], file.text.stat().st_size
    with file.text.open("rb") as stream:
        for place in range(file.start + size, total, size):
            stream.seek(place - 1)
            stream.readline()
            if starts[-1] < stream.tell() < total:
                starts.append(stream.tell())
    return starts


def count_lines(span: tuple[Path, int, int], progress: Progress) -> int:
    """Count the line breaks in the bytes of a file from start to end."""
    path, start, end = span
    lines = 0
    with path.open("rb") as stream:
        stream.seek(start)
        while start < end and (block := stream.read(min(BLOCK, end - start))):
            lines += block.count(b"\n")
            start += len(block)
    progress(f"counting rows of {path.name} (bytes)", end, path.stat().st_size)
    return lines
