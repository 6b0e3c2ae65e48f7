"""Mixup and CutMix on whole batches, and smoothed labels, like timm's ``Mixup(mode="batch")``.

Each image is mixed with its mirror in the batch (the first with the last, and so on), all with the same λ; the middle
image of an odd batch stays as it is. CutMix takes λ from the box that was actually cut, after clipping at the border.

Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018; Yun et al., "CutMix", ICCV 2019.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.tasks.vision.settings import Augmentation

Box = tuple[slice, slice]  # rows and columns


def smooth(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """(B,) labels → (B, classes) targets: 1 − ε for the label, and ε spread evenly over all classes."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes


def mix(images: Tensor, targets: Tensor, settings: Augmentation, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    draws = _draws(generator)
    if draws.random() >= settings.mix_probability:
        return images, targets
    cut = settings.cutmix > 0 and (settings.mixup == 0 or draws.random() < settings.mix_switch)
    alpha = settings.cutmix if cut else settings.mixup
    share = float(draws.beta(alpha, alpha))
    if not cut:
        return mixup(images, targets, share)
    height, width = images.shape[-2:]
    return cutmix(images, targets, cut_box(height, width, share, draws.integers(height), draws.integers(width)))


def mixup(images: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Take λ = ``share`` of each image and target, and 1 − λ of its mirror in the batch."""
    return _blend(images, share), _blend(targets, share)


def cutmix(images: Tensor, targets: Tensor, box: Box) -> tuple[Tensor, Tensor]:
    """Fill ``box`` of each image from its mirror in the batch, and mix targets by the box's area."""
    rows, columns = box
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    mixed = images.clone()
    mixed[..., rows, columns] = images.flip(0)[..., rows, columns]
    return mixed, _blend(targets, 1 - area / (images.shape[-2] * images.shape[-1]))


def cut_box(height: int, width: int, share: float, row: int, column: int) -> Box:
    """Return the box with 1 − ``share`` of the area around (row, column), clipped at the border."""
    side = math.sqrt(1 - share)

    def along(size: int, middle: int) -> slice:
        length = int(size * side)
        return slice(max(int(middle) - length // 2, 0), min(int(middle) + (length + 1) // 2, size))

    return along(height, row), along(width, column)


def _blend(x: Tensor, share: float) -> Tensor:
    return x * share + x.flip(0) * (1 - share)


def _draws(generator: torch.Generator) -> np.random.Generator:
    """Seed a numpy generator from torch's, because torch has no public Beta distribution that takes a generator."""
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return np.random.default_rng(int(seed))
