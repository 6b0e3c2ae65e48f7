"""ImageNet-1K, decoded when needed: an image folder or Hugging Face's parquet files, whichever ``data.path`` holds.

    folder    train/<wnid>/*.JPEG, val/<wnid>/*.JPEG          labels by the order of the wnids
    parquet   data/train-*.parquet, data/validation-*.parquet  columns image {bytes, path} and label

Either may have ``classes.json`` beside it, with the classes' names. The official validation set is the test set;
validation is held out from the training images.

A parquet file can only be read one row group at a time (some hundred images). The last few groups are kept, which makes
reading in order cheap. In random order each image costs a whole group, so unpack the files for long training runs
(``docs/data.md``).
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from intbmoe.models.vit import ViTConfig
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import require_path
from intbmoe.tasks.parquet import find_parquet, open_parquet
from intbmoe.tasks.preparation import UNFINISHED
from intbmoe.tasks.vision.class_names import find_class_names
from intbmoe.tasks.vision.decode import decode, middle_square
from intbmoe.tasks.vision.folder import FolderImages, class_folders, list_images
from intbmoe.tasks.vision.source import IMAGENET_NORMALISATION, Images, Source, check_labels, hold_out

WHAT = "a folder with train/<class>/ and val/<class>/ or with data/train-*.parquet"
KEPT_GROUPS = 4
COLUMNS = ("image", "label")  # of parquet files; an image is a struct with ``bytes``


def read(path: str | None, model: ViTConfig, valid_fraction: float) -> Source:
    if model.channels != 3:
        raise DataError(f"imagenet images have 3 channels: set model.channels=3 (it is {model.channels})")
    root = require_path(path, "imagenet", WHAT, "docs/data.md")
    if (root / UNFINISHED).is_dir():
        command = f"intbmoe prepare imagenet SOURCE {root}"
        raise DataError(f"{root} is not finished, its preparation was stopped: {command} resumes it")
    if sorted(root.glob("data/train-*.parquet")):
        folders = None
        train, test = (ParquetImages.find(root, split) for split in ("train", "validation"))
        names = [f"{root}/data/{split}-*.parquet" for split in ("train", "validation")]
    else:
        folders, train, test = _folders(root)
        names = [str(root / "train"), str(root / "val")]
    for images, name in zip((train, test), names, strict=True):
        check_labels(images.labels, model.classes, name)
    kept, held = hold_out(train.labels, valid_fraction, names[0])
    class_names = find_class_names(root, model.classes)
    return Source(train.subset(kept), train.subset(held), test, IMAGENET_NORMALISATION, class_names, folders)


def _folders(root: Path) -> tuple[tuple[str, ...], Images, Images]:
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise DataError(f"{root / split} is missing: data.path must be {WHAT} (see docs/data.md)")
    classes = class_folders(root / "train")
    if class_folders(root / "val") != classes:
        differing = sorted(set(classes) ^ set(class_folders(root / "val")))
        raise DataError(
            f"{root}: train/ and val/ must have the same class folders, but {len(differing)} are in only one of them, "
            f"such as {differing[0]!r} (see docs/data.md)"
        )
    train, val = (FolderImages(root / name, *list_images(root / name, classes)) for name in ("train", "val"))
    return tuple(classes), train, val


class ParquetImages:
    def __init__(self, files: list[Path], rows: np.ndarray, labels: np.ndarray) -> None:
        self.files = files
        self.rows = rows  # (N, 3) file, row group, row in the group
        self.labels = labels
        self._begin()

    def _begin(self) -> None:
        """Start without open files, which must not be shared with the process that this one was forked from."""
        self._process = os.getpid()
        self._open = lru_cache(None)(lambda file: open_parquet(self.files[file], COLUMNS, "images"))
        self._group = lru_cache(KEPT_GROUPS)(
            lambda file, group: _read(self._open(file), self.files[file], group, "image")
        )

    @classmethod
    def find(cls, root: Path, split: str) -> "ParquetImages":
        """Find the images of ``root/data/split-*.parquet``; only the labels are read yet."""
        files = find_parquet(root, split)
        rows, labels = [], []
        for number, file in enumerate(files):
            opened = open_parquet(file, COLUMNS, "images")
            for group in range(opened.num_row_groups):
                found = _read(opened, file, group, "label").to_numpy()
                rows.append(np.stack(np.broadcast_arrays(number, group, np.arange(len(found))), axis=1))
                labels.append(found.astype(np.int64))
        if not labels:
            raise DataError(f"{root / 'data'}: {split}-*.parquet hold no row: expected images")
        return cls(files, np.concatenate(rows), np.concatenate(labels))

    def image(self, index: int) -> Image.Image:
        return decode(self.content(index), self._where(index))

    def content(self, index: int) -> bytes:
        if self._process != os.getpid():
            self._begin()
        file, group, row = self.rows[index].tolist()
        image = self._group(file, group)[row].as_py()
        if not (isinstance(image, dict) and isinstance(image.get("bytes"), bytes)):
            where = self._where(index)
            raise DataError(f"{where}: the column 'image' has no bytes; expected a struct with the file in it")
        return image["bytes"]

    def pixels(self, indices: Sequence[int], size: int) -> np.ndarray:
        return np.stack([middle_square(self.image(index), size) for index in indices])

    def subset(self, indices: np.ndarray) -> "ParquetImages":
        return ParquetImages(self.files, self.rows[indices], self.labels[indices])

    def _where(self, index: int) -> str:
        file, group, row = self.rows[index].tolist()
        return f"{self.files[file]}, row group {group}, row {row}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetImages, (self.files, self.rows, self.labels)


def _read(opened: Any, file: Path, group: int, column: str) -> Any:
    from pyarrow import ArrowException

    try:
        return opened.read_row_group(group, columns=[column]).column(column)
    except (ArrowException, OSError) as error:
        raise DataError(f"{file}, row group {group}: the column {column!r} cannot be read: {error}") from error
