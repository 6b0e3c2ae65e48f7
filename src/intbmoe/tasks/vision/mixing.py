"""Mixup and CutMix on whole batches, and smoothed labels, in the manner of timm's ``Mixup(mode="batch")``.

Each image is mixed with its mirror in the batch (the first with the last, …), all with the same λ; the middle image of
an odd batch stays as it is. CutMix takes λ from the box that was really cut, after clipping at the border.

Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018; Yun et al., "CutMix", ICCV 2019.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.tasks.vision.settings import Augmentation


class Box(NamedTuple):
    """Rows top…bottom−1 and columns left…right−1."""

    top: int
    bottom: int
    left: int
    right: int


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
    """λ = ``share`` of each image and target, 1 − λ of its mirror in the batch."""
    return _blend(images, share), _blend(targets, share)


def cutmix(images: Tensor, targets: Tensor, box: Box) -> tuple[Tensor, Tensor]:
    """Each image with ``box`` from its mirror in the batch; targets by the box's area."""
    rows, columns = slice(box.top, box.bottom), slice(box.left, box.right)
    area = (box.bottom - box.top) * (box.right - box.left)
    mixed = images.clone()
    mixed[..., rows, columns] = images.flip(0)[..., rows, columns]
    return mixed, _blend(targets, 1 - area / (images.shape[-2] * images.shape[-1]))


def cut_box(height: int, width: int, share: float, row: int, column: int) -> Box:
    """The box of 1 − ``share`` of the area around (row, column), clipped at the border."""
    side = math.sqrt(1 - share)
    rows, columns = int(height * side), int(width * side)
    return Box(
        max(int(row) - rows // 2, 0),
        min(int(row) + (rows + 1) // 2, height),
        max(int(column) - columns // 2, 0),
        min(int(column) + (columns + 1) // 2, width),
    )


def _blend(x: Tensor, share: float) -> Tensor:
    return x * share + x.flip(0) * (1 - share)


def _draws(generator: torch.Generator) -> np.random.Generator:
    """torch has no public Beta that takes a generator: one number of it seeds numpy's, which has."""
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return np.random.default_rng(int(seed))
