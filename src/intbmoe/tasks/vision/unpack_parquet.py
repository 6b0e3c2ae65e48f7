"""ImageNet's parquet files → an image folder, where reading in random order costs one image each.

    data/train-*.parquet       →  train/<label>/<number>.JPEG
    data/validation-*.parquet  →  val/<label>/<number>.JPEG

Files keep their bytes. Class folders are named after the label, 0000 to 0999, so labels do not change; an image's
number is its row, counted over all files of its split. Each parquet file is a part, which any worker may do.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.parquet import find_parquet, open_parquet, read_batches
from intbmoe.tasks.preparation import UNFINISHED, do_part, prepare_once
from intbmoe.tasks.vision.imagenet import COLUMNS
from intbmoe.tasks.workers import ALONE, Progress, Workers

NAME, VERSION = "imagenet", 1
SPLITS = {"train": "train", "validation": "val"}
READ_ROWS = 64  # images in memory at a time


@dataclass(frozen=True)
class Part:
    file: Path
    folder: str
    first: int  # the number of its first row


def prepare(
    source: Path, target: Path, *, skip_bad: bool, progress: Progress, workers: Workers = ALONE
) -> Mapping[str, Any]:
    parts = [part for split, folder in SPLITS.items() for part in _parts(source, split, folder)]
    plan = {"version": VERSION, "name": NAME, "files": {part.file.name: part.file.stat().st_size for part in parts}}

    def make(unfinished: Path) -> Mapping[str, Any]:
        counted = workers.run("unpacking (files)", Unpacker(target, skip_bad), parts, progress)
        counts = {f"{folder} images": 0 for folder in SPLITS.values()} | {"skipped": 0}
        for part, one in zip(parts, counted, strict=True):
            counts[f"{part.folder} images"] += one["images"]
            counts["skipped"] += one["skipped"]
        return {"counts": counts}

    return prepare_once(target, plan, make)["counts"]


def _parts(source: Path, split: str, folder: str) -> list[Part]:
    parts, first = [], 0
    for file in find_parquet(source, split):
        parts.append(Part(file, folder, first))
        first += open_parquet(file, COLUMNS, "images").metadata.num_rows
    return parts


@dataclass(frozen=True)
class Unpacker:
    """Writes the images of parquet files, in any process."""

    target: Path
    skip_bad: bool

    def __call__(self, part: Part, progress: Progress) -> dict[str, int]:
        """Return how many images were written and how many rows left out; a finished part is not done again."""
        work = partial(self._unpack, part, progress)
        return do_part(self.target / UNFINISHED, part.file.stem, self.skip_bad, work)

    def _unpack(self, part: Part, progress: Progress, own: Path) -> dict[str, int]:
        opened = open_parquet(part.file, COLUMNS, "images", pre_buffer=False)
        row, skipped, total = 0, 0, opened.metadata.num_rows
        for batch in read_batches(opened, part.file, COLUMNS, READ_ROWS):
            for image, label in zip(*(batch.column(name).to_pylist() for name in COLUMNS), strict=True):
                problem = _problem(image, label)
                if problem is None:
                    (own / "image").write_bytes(image["bytes"])
                    place = self.target / part.folder / f"{label:04d}" / f"{part.first + row:08d}.JPEG"
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(own / "image", place)
                elif self.skip_bad:
                    skipped += 1
                else:
                    raise DataError(f"{part.file}, row {row}: {problem} (--skip-bad leaves such rows out)")
                row += 1
            progress(f"unpacking {part.file.name}", row, total)
        return {"images": total - skipped, "skipped": skipped}


def _problem(image: Any, label: Any) -> str | None:
    if not (isinstance(image, dict) and isinstance(image.get("bytes"), bytes)):
        return "the column 'image' has no bytes; expected a struct with the file in it"
    if not isinstance(label, int) or label < 0:
        return f"the label is {label!r}, expected a whole number of at least 0"
    return None
