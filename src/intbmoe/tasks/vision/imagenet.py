"""ImageNet-1K, decoded when asked for: an image folder or Hugging Face's parquet files, whichever ``data.path`` holds.

    folder    train/<wnid>/*.JPEG, val/<wnid>/*.JPEG          labels by the order of the wnids
    parquet   data/train-*.parquet, data/validation-*.parquet  columns image {bytes, path} and label

Either may have ``classes.json`` beside it, with the classes' names. The official validation set is the test set;
validation is held out of the training images.
"""

from pathlib import Path

from intbmoe.models.vit import ViTConfig
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import require_path
from intbmoe.tasks.preparation import UNFINISHED
from intbmoe.tasks.vision.class_names import find_class_names
from intbmoe.tasks.vision.folder import FolderImages, class_folders, list_images
from intbmoe.tasks.vision.imagenet_parquet import ParquetImages
from intbmoe.tasks.vision.source import IMAGENET_NORMALISATION, Images, Source, check_labels, hold_out

WHAT = "a folder with train/<class>/ and val/<class>/ or with data/train-*.parquet"


def read(path: str | None, model: ViTConfig, valid_fraction: float) -> Source:
    if model.channels != 3:
        raise DataError(f"imagenet images have 3 channels: set model.channels=3 (it is {model.channels})")
    root = require_path(path, "imagenet", WHAT, "docs/data.md")
    if (root / UNFINISHED).is_dir():
        command = f"intbmoe prepare imagenet SOURCE {root}"
        raise DataError(f"{root} is not finished, its preparation was stopped: {command} goes on from there")
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
            f"{root}: train/ and val/ must have the same class folders, but {len(differing)} are in one only, "
            f"such as {differing[0]!r} (see docs/data.md)"
        )
    train, val = (FolderImages(root / name, *list_images(root / name, classes)) for name in ("train", "val"))
    return tuple(classes), train, val
