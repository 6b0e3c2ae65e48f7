"""The specification, in plain torch."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from intbmoe.precision import wide

WIDE_SCORES = 2**26  # scores in float32 at a time: 256 MiB


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(N, V) scores and (N,) ids → (N,) losses, computed in float32 at least.

    The scores over a large vocabulary are the largest tensor of a model: 1 GiB in float32 for 8,192 tokens and 32,000
    ids. They are converted for some tokens at a time, and again in backward, so that neither a float32 copy nor its
    gradient is kept.
    """
    tokens = max(1, WIDE_SCORES // logits.shape[-1])
    if len(targets) <= tokens:
        return _losses(logits, targets)
    again = partial(checkpoint, _losses, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(*part) for part in zip(logits.split(tokens), targets.split(tokens), strict=True)])


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits), targets, reduction="none")
