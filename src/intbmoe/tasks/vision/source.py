"""What the sources share: collections of labelled images, and how a validation part is held out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from intbmoe.tasks.errors import DataError

HOLD_OUT_SEED = 20260


class Normalisation(NamedTuple):
    """Pixels in [0, 1] become (pixel − mean) / std, channel by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET_NORMALISATION = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Images(Protocol):
    labels: np.ndarray  # (N,) int64

    def image(self, index: int) -> Image.Image:
        """Return one image as it is stored, whatever its size."""

    def pixels(self, indices: Sequence[int], size: int) -> np.ndarray:
        """Return (B, size, size, channels) uint8: the middle square of each image at that size."""

    def subset(self, indices: np.ndarray) -> "Images":
        """Return the images at ``indices``, in that order."""


@dataclass(frozen=True)
class Source:
    train: Images
    valid: Images
    test: Images
    normalisation: Normalisation
    class_names: tuple[str, ...] | None = None  # by label; None if the source does not give them
    class_folders: tuple[str, ...] | None = None  # by label: WordNet ids, if the images are in folders
    fingerprint: str | None = None  # of a folder: names and sizes of all files, and the content of some


@dataclass(frozen=True, eq=False)
class ArrayImages:
    array: np.ndarray  # (N, H, W, channels) uint8
    labels: np.ndarray

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.array[index].squeeze(-1) if self.array.shape[-1] == 1 else self.array[index])

    def pixels(self, indices: Sequence[int], size: int) -> np.ndarray:
        if self.array.shape[1:3] != (size, size):
            raise ValueError(f"the images are {self.array.shape[1]}×{self.array.shape[2]} px, not {size}×{size}")
        return self.array[np.asarray(indices, dtype=np.int64)]

    def subset(self, indices: np.ndarray) -> "ArrayImages":
        return ArrayImages(self.array[indices], self.labels[indices])


def hold_out(labels: np.ndarray, fraction: float, where: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return indices kept and held out, in ascending order; ``fraction`` applies to each class, at least one if not 0.

    The choice depends only on a class's number and size (and on ``seed``, which is not the training seed), so that
    every method, training seed and machine holds out the same images.
    """
    held = [np.zeros(0, dtype=np.int64)]
    for label in np.unique(labels) if fraction else ():
        members = np.flatnonzero(labels == label)
        count = max(1, round(fraction * len(members)))
        if count >= len(members):
            raise DataError(
                f"{where}: class {label} has {len(members)} training image(s), too few to hold out "
                f"data.valid_fraction={fraction} for validation and keep some to train on"
            )
        drawn = [HOLD_OUT_SEED, int(label), seed] if seed else [HOLD_OUT_SEED, int(label)]
        held.append(np.random.default_rng(drawn).permutation(members)[:count])
    out = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), out), out


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    if len(labels) == 0:
        raise DataError(f"{where} holds no image: expected some of each of {classes} classes")
    present = np.unique(labels)
    if not np.array_equal(present, np.arange(classes)):
        found = f"{len(present)} classes, numbered {present[0]} to {present[-1]}"
        expected = f"model.classes={classes}, numbered 0 to {classes - 1}, each with an image"
        raise DataError(f"{where} holds {found}: expected {expected}")


def check_image_size(image_size: int, channels: int, expected: tuple[int, int], source: str) -> None:
    if (image_size, channels) != expected:
        raise DataError(
            f"{source} images are {expected[0]} px with {expected[1]} channel(s): set model.image_size={expected[0]} "
            f"and model.channels={expected[1]} (they are {image_size} and {channels})"
        )
