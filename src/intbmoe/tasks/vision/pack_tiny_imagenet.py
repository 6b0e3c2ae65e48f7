"""Make the tar for the ``tiny-imagenet`` source from the official Tiny-ImageNet-200 folder.

    python -m intbmoe.tasks.vision.pack_tiny_imagenet tiny-imagenet-200 tiny_imagenet200_32px.tar

Images shrink from 64 to 32 px by averaging 2×2 pixels. Each class becomes one sheet per split; tiles are multiples of
8 px and chroma is not subsampled, so no JPEG block covers parts of two images.
"""

import argparse
import io
import json
import math
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.vision.decode import decode
from intbmoe.tasks.vision.tiny_imagenet import TILE

QUALITY = 85


def pack(folder: Path, output: Path) -> None:
    """Write ``output`` from the official ``folder``, as unzipped."""
    wnids = sorted(_lines(folder / "wnids.txt"))
    words = dict(line.split("\t", 1) for line in _lines(folder / "words.txt"))
    tested = [line.split("\t")[:2] for line in _lines(folder / "val" / "val_annotations.txt")]
    classes = [{"label": label, "wnid": wnid, "name": words.get(wnid, wnid)} for label, wnid in enumerate(wnids)]
    with tarfile.open(output, "w") as tar:
        _add(tar, "classes.json", json.dumps(classes, indent=1).encode())
        for label, wnid in enumerate(wnids):
            train = sorted((folder / "train" / wnid / "images").glob("*.JPEG"), key=_number)
            val = sorted((folder / "val" / "images" / name for name, of in tested if of == wnid), key=_number)
            for split, files in (("train", train), ("val", val)):
                if not files:
                    raise DataError(f"{folder}: no {split} image of {wnid}; expected the official folder, unzipped")
                _add(tar, f"{split}/{label:03d}.jpg", _sheet(files))


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{file} cannot be read: expected the official tiny-imagenet-200 folder ({error})") from error


def _number(file: Path) -> int:
    """Return the number in an image's name: n01443537_12.JPEG, val_12.JPEG."""
    return int(file.stem.rsplit("_", 1)[1])


def _sheet(files: Sequence[Path]) -> bytes:
    """Return one JPEG with all images, in the squarest grid without gaps."""
    rows = max(divisor for divisor in range(1, math.isqrt(len(files)) + 1) if len(files) % divisor == 0)
    tiles = np.stack([_halve(file) for file in files])
    grid = tiles.reshape(rows, -1, TILE, TILE, 3).swapaxes(1, 2).reshape(rows * TILE, -1, 3)
    content = io.BytesIO()
    Image.fromarray(grid).save(content, "JPEG", quality=QUALITY, subsampling=0, progressive=True)
    return content.getvalue()


def _halve(file: Path) -> np.ndarray:
    image = np.asarray(decode(file, str(file)), dtype=np.float32)
    if image.shape != (2 * TILE, 2 * TILE, 3):
        raise DataError(f"{file} is {image.shape[1]}×{image.shape[0]} px: expected {2 * TILE}×{2 * TILE}")
    return np.rint(image.reshape(TILE, 2, TILE, 2, 3).mean(axis=(1, 3))).astype(np.uint8)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack the official Tiny-ImageNet-200 folder into one tar at 32 px.")
    parser.add_argument("folder", type=Path, help="the unzipped tiny-imagenet-200")
    parser.add_argument("output", type=Path, help="the tar to write")
    arguments = parser.parse_args()
    pack(arguments.folder, arguments.output)


if __name__ == "__main__":
    main()
