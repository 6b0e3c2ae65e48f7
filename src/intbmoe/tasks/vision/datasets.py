"""Images given in Python, written as a folder of class folders."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from intbmoe.files import to_json
from intbmoe.tasks.datasets import by_split, entries, field
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.vision.class_names import FILE
from intbmoe.tasks.vision.decode import in_mode

IMAGE, LABEL = ("image", "img"), ("label", "labels", "class")


def save_images(data: Any, folder: Path) -> None:
    """Write (image, label) pairs or dicts with these keys; images are PIL, arrays (H, W, C) or tensors (C, H, W).

    Labels are whole numbers, which remain the classes' numbers if they start at 0 without gaps, or names.
    """
    splits = by_split(data)
    names = _class_names(splits["train"])
    files: dict[str, list[tuple[Any, Path]]] = {}
    for split, dataset in splits.items():
        (folder / split).mkdir(parents=True)
        for index, entry in enumerate(entries(dataset, f"data[{split!r}]")):
            where = f"data[{split!r}][{index}]"
            image, label = _pair(entry, where)
            file = folder / split / f"{index:08d}.png"
            _to_image(image, where).save(file, compress_level=1)
            files.setdefault(split, []).append((_plain(label, where), file))
    labels = sorted({label for label, _ in files["train"]}, key=lambda label: (isinstance(label, str), label))
    if len(labels) == 1:
        raise DataError(f"data['train'] has one label, {labels[0]!r}: expected two or more")
    digits = len(str(len(labels)))
    number = {label: f"{place:0{digits}d}" for place, label in enumerate(labels)}
    for split, found in files.items():
        for label, file in found:
            if label not in number:
                raise DataError(f"data[{split!r}] has the label {label!r}, which data['train'] lacks")
            (file.parent / number[label]).mkdir(exist_ok=True)
            os.rename(file, file.parent / number[label] / file.name)
    shown = [
        names[label] if names and isinstance(label, int) and label < len(names) else str(label) for label in labels
    ]
    (folder / FILE).write_bytes(to_json([{"label": place, "name": name} for place, name in enumerate(shown)]))


def _class_names(dataset: Any) -> list[str] | None:
    """Return what torchvision (``classes``) or Hugging Face (``features``) call whole-number labels."""
    features = getattr(dataset, "features", None)
    kinds = [features[name] for name in LABEL if name in features] if isinstance(features, Mapping) else []
    names = getattr(kinds[0], "names", None) if kinds else getattr(dataset, "classes", None)
    return [str(name) for name in names] if names else None


def _pair(entry: Any, where: str) -> tuple[Any, Any]:
    if isinstance(entry, Mapping):
        return field(entry, IMAGE, "", where), field(entry, LABEL, "", where)
    if isinstance(entry, tuple | list) and len(entry) == 2:
        return entry[0], entry[1]
    raise DataError(f"{where} is {type(entry).__name__}: expected (image, label), or a dict with 'image' and 'label'")


def _plain(label: Any, where: str) -> int | str:
    value = label.item() if hasattr(label, "item") else label
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise DataError(f"{where} has the label {value!r}: expected a whole number of at least 0, or a name")


def _to_image(image: Any, where: str) -> Image.Image:
    if isinstance(image, Image.Image):
        return in_mode(image, image.mode if image.mode in ("L", "RGB") else "RGB", where)
    tensor = hasattr(image, "detach")
    array = image.detach().cpu().numpy() if tensor else np.asarray(image)
    if array.ndim == 3 and tensor:
        array = array.transpose(1, 2, 0)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3)) or array.dtype.kind not in "uif":
        shape = tuple(image.shape) if tensor else array.shape
        expected = "a PIL image, an array (height, width, 1 or 3) or a tensor (1 or 3, height, width)"
        raise DataError(f"{where}: the image is {type(image).__name__} of shape {shape}: expected {expected}")
    if array.dtype.kind == "f":
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            found = f"{array.min():.3g} to {array.max():.3g}"
            expected = "floating-point pixels must be from 0 to 1 (the recipe normalises them); for 0 to 255 use uint8"
            raise DataError(f"{where}: pixels go from {found}: {expected}")
        array = np.rint(array * 255)
    elif array.min() < 0 or array.max() > 255:
        raise DataError(f"{where}: pixels go from {array.min()} to {array.max()}: expected 0 to 255")
    array = array.astype(np.uint8)
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)
