"""Tables in stretches of whole rows, so that several workers can read one large file.

A row's number in its file must be known, for messages and because the first of two profiles counts. So line breaks are
counted first where a file is divided, which takes far less time than parsing. A gzipped file can only be read from its
beginning: it is one stretch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from intbmoe.tasks.travel.store import read_json, write_json
from intbmoe.tasks.travel.tables import TableFile
from intbmoe.tasks.workers import Progress, Workers

BLOCK = 1 << 24  # bytes in which lines are counted at a time


@dataclass(frozen=True)
class Stretch:
    file: TableFile
    start: int
    """Where its first row begins, in bytes of the file's text."""
    first_row: int
    end: int | None = None
    """Where the next stretch begins; None for the last."""


def whole(file: TableFile) -> Stretch:
    return Stretch(file, file.start, file.first_row)


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
    return [Stretch(file, *place) for place in zip(known["starts"], first_rows, ends, strict=True)]


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
