"""Draws substitute pictures for Tiny-ImageNet, which may not be redistributed: a disc or stripes on a colour gradient.

An export of the zoo's Tiny-ImageNet models is compared on these pictures. Their labels mean nothing.
"""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from intbmoe.tasks.vision.class_names import FILE
from intbmoe.tasks.vision.tiny_imagenet import TILE

SHEETS = {"train": 2, "val": 1}  # pictures per class; one of train's is held out


def write_stand_in(data: Path, target: Path) -> None:
    """Writes a tar like ``data``, with its class names but none of its pictures."""
    with tarfile.open(data) as real:
        names = real.extractfile(next(one for one in real if one.name.removeprefix("./") == FILE)).read()
    with tarfile.open(target, "w:xz") as tar:
        _add(tar, FILE, names)
        for label in range(len(json.loads(names))):
            for split, count in SHEETS.items():
                seeds = [(label, split == "val", number) for number in range(count)]
                _add(tar, f"{split}/{label:03d}.jpg", _sheet([draw(np.random.default_rng(seed)) for seed in seeds]))


def draw(random: np.random.Generator) -> np.ndarray:
    """Draws one picture as (32, 32, 3) bytes."""
    back, front, far = random.uniform(0, 255, (3, 3))
    row, column = np.mgrid[:TILE, :TILE] / TILE
    picture = back + (far - back) * ((row + column) / 2)[..., None]
    if random.random() < 0.5:
        middle, radius = random.uniform(0.3, 0.7, 2), random.uniform(0.15, 0.4)
        inside = np.hypot(row - middle[0], column - middle[1]) < radius
    else:
        turn, width = random.uniform(0, np.pi), random.uniform(3, 9)
        inside = np.sin(2 * np.pi * width * (row * np.cos(turn) + column * np.sin(turn))) > 0.3
    return np.where(inside[..., None], front, picture).astype(np.uint8)


def _sheet(pictures: list[np.ndarray]) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.concatenate(pictures, axis=1)).save(content, "JPEG", quality=75, subsampling=0)
    return content.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
