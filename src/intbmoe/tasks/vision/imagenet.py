"""ImageNet-1K, decoded when asked for: an image folder or Hugging Face's parquet files, whichever ``data.path`` holds.

    folder    train/<wnid>/*.JPEG, val/<wnid>/*.JPEG          labels by the order of the wnids
    parquet   data/train-*.parquet, data/validation-*.parquet  columns image {bytes, path} and label

Either may have ``classes.json`` beside it, with the classes' names. The official validation set is the test set;
validation is held out of the training images.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from intbmoe.models.vit import ViTConfig
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.vision.class_names import FILE, read_class_names
from intbmoe.tasks.vision.decode import decode, middle_square
from intbmoe.tasks.vision.imagenet_parquet import ParquetImages
from intbmoe.tasks.vision.source import IMAGENET_NORMALISATION, Images, Source, check_labels, hold_out, require_path

WHAT = "a folder with train/<class>/ and val/<class>/ or with data/train-*.parquet"
SUFFIXES = (".jpeg", ".jpg", ".png")


def read(path: str | None, model: ViTConfig, valid_fraction: float) -> Source:
    if model.channels != 3:
        raise DataError(f"imagenet images have 3 channels: set model.channels=3 (it is {model.channels})")
    root = require_path(path, "imagenet", WHAT)
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
    file = root / FILE
    class_names = read_class_names(file.read_bytes(), model.classes, str(file)) if file.is_file() else None
    return Source(train.subset(kept), train.subset(held), test, IMAGENET_NORMALISATION, class_names, folders)


class FolderImages:
    def __init__(self, folder: Path, files: np.ndarray, labels: np.ndarray) -> None:
        self.folder = folder
        self.files = files  # (N,) paths inside ``folder``, bytes in one array: workers would copy a million strings
        self.labels = labels

    def image(self, index: int) -> Image.Image:
        file = self.folder / os.fsdecode(self.files[index])
        return decode(file, str(file))

    def pixels(self, indices: Sequence[int], size: int) -> np.ndarray:
        return np.stack([middle_square(self.image(index), size) for index in indices])

    def subset(self, indices: np.ndarray) -> "FolderImages":
        return FolderImages(self.folder, self.files[indices], self.labels[indices])


def _folders(root: Path) -> tuple[tuple[str, ...], Images, Images]:
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise DataError(f"{root / split} is missing: data.path must be {WHAT} (see docs/data.md)")
    classes = _class_folders(root / "train")
    if _class_folders(root / "val") != classes:
        differing = sorted(set(classes) ^ set(_class_folders(root / "val")))
        raise DataError(
            f"{root}: train/ and val/ must have the same class folders, but {len(differing)} are in one only, "
            f"such as {differing[0]!r} (see docs/data.md)"
        )
    return tuple(classes), _folder_images(root / "train", classes), _folder_images(root / "val", classes)


def _class_folders(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not names:
        raise DataError(f"{folder} has no class folder: expected one a class, such as n01440764 (see docs/data.md)")
    return names


def _folder_images(folder: Path, classes: list[str]) -> FolderImages:
    files, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(entry.name for entry in os.scandir(folder / name) if entry.name.lower().endswith(SUFFIXES))
        if not found:
            raise DataError(f"{folder / name} holds no image: expected files ending in {', '.join(SUFFIXES)}")
        files.extend(f"{name}/{file}" for file in found)
        labels.extend([label] * len(found))
    return FolderImages(folder, np.array([os.fsencode(file) for file in files]), np.array(labels, dtype=np.int64))
