"""Names of classes: from ``classes.json`` beside the data or, for ImageNet, from torchvision and timm.

timm has the thousand WordNet ids in the order of ImageNet's labels, and torchvision a name for each, all different.
Both are optional; without them a class has the name of its folder or its number.
"""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.vision.timm_data import timm_data

FILE = "classes.json"
IMAGENET_CLASSES = 1000


def read_class_names(content: bytes, classes: int, where: str) -> tuple[str, ...]:
    """Return each class's first name, or its number if it has none; classes that share a name also get the number."""
    try:
        found = {entry["label"]: entry["name"].split(",")[0].strip() for entry in json.loads(content)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where} is not a list of objects with label, name ({error!r}; see docs/data.md)") from error
    names = [found.get(label, str(label)) for label in range(classes)]
    return tuple(f"{name} ({label})" if names.count(name) > 1 else name for label, name in enumerate(names))


def find_class_names(folder: Path, classes: int) -> tuple[str, ...] | None:
    file = folder / FILE
    return read_class_names(file.read_bytes(), classes, str(file)) if file.is_file() else None


def imagenet_class_names(wnids: Sequence[str] | None, classes: int) -> tuple[str, ...] | None:
    """Return names of WordNet ids, or of a thousand labels if there are no ids; None if some are not ImageNet's."""
    if wnids is None and classes != IMAGENET_CLASSES:
        return None
    try:
        known = timm_data().ImageNetInfo().label_names()
        names = importlib.import_module("torchvision.models").ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    except ModuleNotFoundError:
        return None
    by_wnid = dict(zip(known, names, strict=True))
    wnids = known if wnids is None else wnids
    return tuple(by_wnid[wnid] for wnid in wnids) if by_wnid.keys() >= set(wnids) else None


def class_labels(names: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
    """Return names with the WordNet id or number that they stand for: "hen (n01514859)"."""
    return tuple(
        name if name == key or name.endswith(f"({key})") else f"{name} ({key})"
        for name, key in zip(names, keys, strict=True)
    )
