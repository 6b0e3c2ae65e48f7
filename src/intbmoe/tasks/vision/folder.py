"""Any folder of class folders; images are decoded when they are needed.

    FOLDER/train/<class>/*.jpg  FOLDER/test/<class>/*.jpg    the one other folder (val, test, …) is the test split;
                                                             validation is held out from train
    FOLDER/train/…  FOLDER/val/…  FOLDER/test/…              each split has the name of its folder
    FOLDER/<class>/*.jpg                                     validation and test are held out, class by class

Labels follow the alphabetical order of the class folders. ``FOLDER/classes.json`` may give them other names.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from intbmoe.checks import some
from intbmoe.models.vit import ViTConfig
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import (
    fingerprint,
    launched_as,
    require_path,
    require_same_data,
    require_size,
    split_of,
)
from intbmoe.tasks.vision.class_names import find_class_names
from intbmoe.tasks.vision.decode import SQUARES, check_header, decode, middle_square
from intbmoe.tasks.vision.source import IMAGENET_NORMALISATION, Normalisation, Source, hold_out

WHAT = "a folder with one folder of images per class, or with train/ and test/ of such folders"
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
GREY = Normalisation((0.449,), (0.226,))  # ImageNet's values, averaged over the channels
MODES = {1: ("L", GREY), 3: ("RGB", IMAGENET_NORMALISATION)}
LOOKED_INTO, END_BYTES = 1000, 4096  # for the fingerprint: files per split, and bytes of each
ENOUGH = 3  # images per class, of which one is held out for validation and one for the test


@dataclass(frozen=True, eq=False)
class FolderImages:
    folder: Path
    files: np.ndarray  # (N,) paths inside ``folder``, as bytes in one array: workers would copy a million strings
    labels: np.ndarray
    mode: str = "RGB"
    square: Callable[[Image.Image, int], np.ndarray] = middle_square

    def path(self, index: int) -> Path:
        return self.folder / os.fsdecode(self.files[index])

    def image(self, index: int) -> Image.Image:
        file = self.path(index)
        return decode(file, str(file), self.mode)

    def pixels(self, indices: Sequence[int], size: int) -> np.ndarray:
        return np.stack([self.square(self.image(index), size).reshape(size, size, -1) for index in indices])

    def subset(self, indices: np.ndarray) -> "FolderImages":
        return replace(self, files=self.files[indices], labels=self.labels[indices])


def read(settings: Any, model: ViTConfig) -> Source:
    """Return the images of the recipe's ``data``."""
    if model.channels not in MODES:
        raise DataError(f"model.channels={model.channels}: images are grey (1) or in colour (3)")
    root = require_path(settings.path, "images", WHAT)
    if not root.is_dir():
        raise DataError(f"{root} is a file: data.path must be {WHAT}; an archive must be unpacked first")
    folders = _split_folders(root)
    classes = class_folders(folders["train"])
    if len(classes) < 2:
        raise DataError(
            f"{folders['train']} has one class, {classes[0]!r}: expected two or more folders, one per class"
        )
    require_size(model.classes, len(classes), "model.classes", str(folders["train"]))
    mode, normalisation = MODES[model.channels]
    found = {}
    for split, folder in folders.items():
        unknown = sorted(set(class_folders(folder)) - set(classes))
        if unknown:
            raise DataError(f"{folder} has classes that {folders['train']} lacks: {some(unknown)}")
        files, labels = list_images(folder, classes, all_classes=split == "train")
        found[split] = FolderImages(folder, files, labels, mode, SQUARES[settings.resize])
    same = _fingerprint(found, classes)
    require_same_data(settings.fingerprint, same, str(root))
    for split, share in (("test", settings.test_fraction), ("valid", settings.valid_fraction)):
        if split not in found:
            if share:
                _require_enough(found["train"].labels, classes, folders["train"])
            kept, held = hold_out(found["train"].labels, share, str(folders["train"]), settings.split_seed)
            found |= {"train": found["train"].subset(kept), split: found["train"].subset(held)}
    names = find_class_names(root, len(classes)) or tuple(classes)
    known = {"class_names": names, "class_folders": tuple(classes), "fingerprint": same}
    return Source(**found, normalisation=normalisation, **known)


def check_images(source: Source) -> None:
    """Raise if a file is not an image, before a long training run reaches it; each of several ranks checks a share."""
    rank, world = launched_as()
    with ThreadPoolExecutor() as threads:
        for images in (source.train, source.valid, source.test):
            for _ in threads.map(check_header, map(images.path, range(rank, len(images.labels), world))):
                pass


def _split_folders(root: Path) -> dict[str, Path]:
    """Return split → folder; if no folder is named after a split, the root itself is train."""
    inside = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    named: dict[str, list[str]] = {}
    for name in inside:
        if (split := split_of(name)) is not None:
            named.setdefault(split, []).append(name)
    others = len(inside) > sum(map(len, named.values()))
    if named and "train" not in named and not others:
        raise DataError(f"{root} has {some(inside)} but no train: expected {WHAT}")
    # A class may also be called train: then it holds images instead of folders, and there are other classes beside it.
    if "train" not in named or (others and not any(entry.is_dir() for entry in os.scandir(root / named["train"][0]))):
        return {"train": root}
    for split, names in named.items():
        if len(names) > 1:
            raise DataError(f"{root} has several folders for {split}: {some(names)}; keep one")
    folders = {split: root / names[0] for split, names in named.items()}
    if "valid" in folders and "test" not in folders:  # as in ImageNet: the one that is not for training is the test
        folders["test"] = folders.pop("valid")
    return folders


def class_folders(folder: Path) -> list[str]:
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    names = sorted(entry.name for entry in entries if entry.is_dir())
    if not names:
        files = [entry.name for entry in entries if entry.name.lower().endswith(SUFFIXES)]
        why = f", only {len(files)} images" if files else "" if entries else ", it is empty"
        raise DataError(f"{folder} has no class folder{why}: expected one folder per class, named after it")
    return names


def list_images(folder: Path, classes: Sequence[str], all_classes: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return (N,) paths inside ``folder`` as bytes, and (N,) labels; with ``all_classes``, each needs an image."""
    files, labels = [], []
    for label, name in enumerate(classes):
        if not all_classes and not (folder / name).is_dir():
            continue
        entries = [entry for entry in os.scandir(folder / name) if not entry.name.startswith(".")]
        found = sorted(entry.name for entry in entries if entry.name.lower().endswith(SUFFIXES))
        if not found and all_classes:
            inner = [entry.name for entry in entries if entry.is_dir()]
            hint = f"; if its folders ({some(inner)}) are the classes or splits, set data.path={folder / name}"
            raise DataError(
                f"{folder / name} holds no image: expected files ending in {', '.join(SUFFIXES)}{hint if inner else ''}"
            )
        files.extend(f"{name}/{file}" for file in found)
        labels.extend([label] * len(found))
    if not files:
        raise DataError(f"{folder} holds no image: expected files ending in {', '.join(SUFFIXES)}")
    return np.array([os.fsencode(file) for file in files]), np.array(labels, dtype=np.int64)


def _require_enough(labels: np.ndarray, classes: Sequence[str], folder: Path) -> None:
    counts = np.bincount(labels, minlength=len(classes))
    if counts.min() < 2:
        name = classes[int(counts.argmin())]
        raise DataError(
            f"{folder / name} has too few images to hold some out: expected {ENOUGH} or more per class, or folders "
            f"train, val and test"
        )


def _fingerprint(found: dict[str, FolderImages], classes: Sequence[str]) -> str:
    parts: list[bytes | str | np.ndarray] = ["\0".join(classes)]
    for split in sorted(found):
        images = found[split]
        sizes = [images.path(index).stat().st_size for index in range(len(images.labels))]
        parts += [split, b"\0".join(images.files.tolist()), np.array(sizes)]
        parts += [_end(images.path(index)) for index in range(0, len(sizes), -(-len(sizes) // LOOKED_INTO))]
    return fingerprint(*parts)


def _end(file: Path) -> bytes:
    """Return the end of the file, where the pixels are: image files begin alike."""
    with open(file, "rb") as content:
        content.seek(max(0, file.stat().st_size - END_BYTES))
        return content.read()
