"""Tiny-ImageNet-200 at 32×32 pixels, from one tar of sheets; ``docs/data.md`` says how to make it.

The tar holds ``train/LLL.jpg`` and ``val/LLL.jpg``, one sheet per class (the number is its label), a grid of 32 px
tiles read row by row. It may hold ``classes.json`` with the classes' names. ``val`` is the test set, because the
official test set has no labels; validation is held out from ``train``. All images stay in memory as bytes, 338 MB.
"""

import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from intbmoe.models.vit import ViTConfig
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import require_path
from intbmoe.tasks.vision.class_names import FILE, read_class_names
from intbmoe.tasks.vision.decode import decode
from intbmoe.tasks.vision.source import (
    IMAGENET_NORMALISATION,
    ArrayImages,
    Source,
    check_image_size,
    check_labels,
    hold_out,
)

TILE = 32
WHAT = "the tar of Tiny-ImageNet-200 sheets"
_SHEET = re.compile(r"(?:\./)?(train|val)/(\d+)\.jpg")


def read(path: str | None, model: ViTConfig, valid_fraction: float) -> Source:
    check_image_size(model.image_size, model.channels, (TILE, 3), "tiny-imagenet")
    file = require_path(path, "tiny-imagenet", WHAT, "docs/data.md")
    sheets, names = _read_tar(file)
    train, test = (_join(sheets[split], model.classes, f"{file}: {split}/") for split in ("train", "val"))
    kept, held = hold_out(train.labels, valid_fraction, f"{file}: train/")
    class_names = None if names is None else read_class_names(names, model.classes, f"{file}: {FILE}")
    return Source(train.subset(kept), train.subset(held), test, IMAGENET_NORMALISATION, class_names)


def _read_tar(file: Path) -> tuple[dict[str, dict[int, np.ndarray]], bytes | None]:
    """Return split → label → (tiles, 32, 32, 3), and the content of the file with the classes' names, if any."""
    sheets: dict[str, dict[int, bytes]] = {"train": {}, "val": {}}
    names = None
    if not file.is_file():
        raise DataError(f"{file} is not a file: data.path must be {WHAT} (see docs/data.md)")
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                found = _SHEET.fullmatch(member.name)
                if found and member.isfile():
                    sheets[found[1]][int(found[2])] = tar.extractfile(member).read()
                elif member.name.removeprefix("./") == FILE and member.isfile():
                    names = tar.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{file} cannot be read as a tar: {error}; expected {WHAT} (see docs/data.md)") from error
    with ThreadPoolExecutor() as threads:  # decoding, which takes most of the time, releases the interpreter's lock
        tiles = {}
        for split, found in sheets.items():
            where = [f"{file}: {split}/{label:03d}.jpg" for label in found]
            tiles[split] = dict(zip(found, threads.map(_tiles, found.values(), where), strict=True))
        return tiles, names


def _tiles(content: bytes, where: str) -> np.ndarray:
    sheet = np.asarray(decode(content, where))
    height, width = sheet.shape[:2]
    if height % TILE or width % TILE:
        raise DataError(f"{where} is {width}×{height} px: expected a sheet of {TILE} px tiles, so multiples of {TILE}")
    grid = sheet.reshape(height // TILE, TILE, width // TILE, TILE, 3)
    return grid.swapaxes(1, 2).reshape(-1, TILE, TILE, 3)


def _join(sheets: dict[int, np.ndarray], classes: int, where: str) -> ArrayImages:
    labels = np.repeat(sorted(sheets), [len(sheets[label]) for label in sorted(sheets)]).astype(np.int64)
    check_labels(labels, classes, where)
    return ArrayImages(np.concatenate([sheets[label] for label in sorted(sheets)]), labels)
