"""Augmentation of single training images; all randomness comes from a key, (seed, epoch, index)."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from intbmoe.tasks.vision.settings import Augmentation
from intbmoe.tasks.vision.source import Normalisation
from intbmoe.tasks.vision.timm_data import timm_data

Key = tuple[int, int, int]


DRAWS = 3  # random numbers per image for ``shift_and_flip``
_STEP, _FIRST, _SECOND = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def example_draws(seed: int, epoch: int, indices: Sequence[int]) -> np.ndarray:
    """Return (B, DRAWS) random 64-bit numbers, those of each index a function of (seed, epoch, index).

    These are the numbers of SplitMix64 (Steele et al., 2014) from a start given by (seed, epoch), at positions given by
    the index. Creating a generator for each image would take longer than everything that is done with its numbers.
    """
    start = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    places = np.asarray(indices, dtype=np.uint64)[:, None] * np.uint64(DRAWS) + np.arange(1, DRAWS + 1, dtype=np.uint64)
    numbers = start + places * _STEP
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    return numbers ^ (numbers >> np.uint64(31))


def shift_and_flip(pixels: np.ndarray, draws: np.ndarray, pad: int, flip: float) -> np.ndarray:
    """(B, H, W, channels) → the same, each image shifted by up to ``pad`` pixels and randomly mirrored."""
    padded = np.pad(pixels, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, pixels.shape[1:3], axis=(1, 2))
    top, left = ((draws[:, :2] >> np.uint64(32)) * np.uint64(2 * pad + 1) >> np.uint64(32)).astype(np.int64).T
    varied = np.moveaxis(windows, 3, -1)[np.arange(len(pixels)), top, left]
    mirrored = (draws[:, 2] >> np.uint64(11)) * 2.0**-53 < flip
    varied[mirrored] = varied[mirrored, :, ::-1]
    return varied


class DeiT:
    """DeiT's augmentation of one image, built from timm's transforms: crop, flip, RandAugment, then erasing."""

    def __init__(self, size: int, normalisation: Normalisation, settings: Augmentation) -> None:
        self._transform = timm_data().create_transform(
            size,
            is_training=True,
            scale=settings.crop_scale,
            ratio=settings.crop_ratio,
            hflip=settings.flip,
            auto_augment=settings.rand_augment,
            interpolation="bicubic",
            re_prob=settings.erasing,
            re_mode="pixel",
            re_count=1,
            mean=normalisation.mean,
            std=normalisation.std,
        )
        for step in self._transform.transforms:
            for operation in getattr(step, "ops", ()):  # RandAugment's
                if operation.name.startswith("Posterize"):
                    operation.aug_fn = _posterize

    def __call__(self, image: Image.Image, key: Key) -> Tensor:
        """Turn an image of any size into (3, size, size), normalised."""
        with seeded(key):
            return self._transform(image)


def _posterize(image: Image.Image, bits: int, **unused: object) -> Image.Image:
    """Keep the highest ``bits``; for one image in 40 timm asks for 0, which means black but fails in newer Pillows."""
    if bits == 0:
        return Image.new(image.mode, image.size)
    return image if bits >= 8 else ImageOps.posterize(image, bits)


@contextmanager
def seeded(key: Key) -> Iterator[None]:
    """Seed Python's, numpy's and torch's (CPU) global generators from ``key`` inside: timm draws from all three."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for_python, for_numpy, for_torch = np.random.SeedSequence(key).generate_state(3).tolist()
    try:
        random.seed(for_python)
        np.random.seed(for_numpy)
        # Only the CPU's generator: torch.manual_seed would also reset the GPUs'.
        torch.default_generator.manual_seed(for_torch)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
