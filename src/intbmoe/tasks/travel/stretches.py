"""Tables in stretches of whole rows, so that several workers can read one large file, and these in chunks.

A row's number in its file must be known, for messages and because the first of two profiles counts. So line breaks are
counted first where a file is divided, which takes far less time than parsing. A gzipped file can only be read from its
beginning: it is one stretch.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import BinaryIO

from intbmoe.tasks.travel.store import read_json, write_json
from intbmoe.tasks.travel.tables import BadRows, TableFile
from intbmoe.tasks.workers import Progress, Workers

BLOCK = 1 << 24  # bytes in which lines are counted at a time
PLAIN_BYTES = b"0123456789-.\t\n"
TOO_LARGE = b"%d" % 2**63


@dataclass(frozen=True)
class Chunk:
    """Whole rows of a file, copied as text to ``path``, each ended by a line feed alone."""

    file: TableFile
    path: Path
    start: int
    end: int
    """Where the chunk lies, in bytes of the file's text."""
    first_row: int
    rows: int
    plain: bool
    """Whether it has no byte that a plain number cannot have, nor −2⁶³, which stands for an empty field."""
    points: int
    """Decimal points in it."""
    last: bool
    """Of its stretch."""
    cut: str
    """Why the file is thought to end in the middle of a row, after this chunk; empty if it does not."""

    def report_cut(self, bad: BadRows) -> None:
        """After the rows were read."""
        if self.cut:
            where = f"{self.file.where(self.first_row + self.rows)}: the file is cut off here ({self.cut})"
            message = f"{where}: get it again, or end its last row with a line break"
            bad.report(f"{self.file.table.name}: file cut off", message)


@dataclass(frozen=True)
class Stretch:
    file: TableFile
    number: int
    """In its file."""
    start: int
    """Where its first row begins, in bytes of the file's text."""
    first_row: int
    end: int | None = None
    """Where the next stretch begins; None for the last."""

    def chunks(self, size: int, path: Path) -> Iterator[Chunk]:
        """All of it, at least one: ``size`` bytes and the rest of the last row each, whose text is then in ``path``."""
        start, first_row, last = self.start, self.first_row, False
        with self.file.open() as stream:
            stream.seek(start)
            while not last:
                wanted = size if self.end is None else min(size, self.end - start)
                text, cut = _read(stream, wanted)
                last = bool(cut) or len(text) < wanted
                if not last and not text.endswith(b"\n"):
                    rest, cut = _read(stream, None)
                    text, last = text + rest, bool(cut) or not rest.endswith(b"\n")
                whole = text.rfind(b"\n") + 1
                if last and not cut and whole < len(text):
                    cut = "it does not end with a line break"
                text = text[:whole].replace(b"\r\n", b"\n")
                path.write_bytes(text)
                plain = not text.translate(None, PLAIN_BYTES) and TOO_LARGE not in text
                end, rows = start + whole, text.count(b"\n")
                last = last or end == self.end
                yield Chunk(self.file, path, start, end, first_row, rows, plain, text.count(b"."), last, cut)
                start, first_row = end, first_row + rows


def _read(stream: BinaryIO, size: int | None) -> tuple[bytes, str]:
    """``size`` bytes, or the rest of the line if None; less where the file ends or the gzip stream breaks, and why."""
    parts = []
    while size != 0:
        try:
            part = stream.readline() if size is None else stream.read1(size)
        except (EOFError, OSError, zlib.error) as error:
            return b"".join(parts), str(error)
        parts.append(part)
        size = size - len(part) if size and part else 0
    return b"".join(parts), ""


def whole(file: TableFile) -> Stretch:
    return Stretch(file, 0, file.start, file.first_row)


def divide(file: TableFile, size: int, kept: Path, workers: Workers, progress: Progress) -> list[Stretch]:
    """Stretches of some ``size`` bytes. What was counted is kept in the file ``kept``."""
    if file.path.stat().st_size - file.start <= size or file.zipped:
        return [whole(file)]
    stamp, known = [file.stamp(), size], read_json(kept)
    if known is None or known["stamp"] != stamp:
        starts = _find_starts(file, size)
        spans = [(file.path, start, end) for start, end in pairwise(starts)]
        rows = workers.run(f"counting rows of {file.path.name} (stretches)", count_lines, spans, progress)
        known = {"stamp": stamp, "starts": starts, "rows": rows}
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, known)
    first_rows = accumulate(known["rows"], initial=file.first_row)
    ends: Sequence[int | None] = [*known["starts"][1:], None]
    return [Stretch(file, *place) for place in zip(count(), known["starts"], first_rows, ends, strict=False)]


def _find_starts(file: TableFile, size: int) -> list[int]:
    """Where rows begin, the first one, and the next after each ``size`` bytes."""
    starts, total = [file.start], file.path.stat().st_size
    with file.path.open("rb") as stream:
        for place in range(file.start + size, total, size):
            stream.seek(place - 1)
            stream.readline()
            if starts[-1] < stream.tell() < total:
                starts.append(stream.tell())
    return starts


def count_lines(span: tuple[Path, int, int], progress: Progress) -> int:
    """Line breaks in the bytes of a file from start to end."""
    path, start, end = span
    lines = 0
    with path.open("rb") as stream:
        stream.seek(start)
        while start < end and (block := stream.read(min(BLOCK, end - start))):
            lines += block.count(b"\n")
            start += len(block)
    progress(f"counting rows of {path.name} (bytes)", end, path.stat().st_size)
    return lines
