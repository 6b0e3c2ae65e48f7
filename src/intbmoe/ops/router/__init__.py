"""A router's scores: two linear maps with a ReLU between them, in float32."""

import torch
from torch import Tensor

from intbmoe.ops.router import naive
from intbmoe.ops.triton_support import usable

__all__ = ["naive", "router_scores"]

MOST_HIDDEN, MOST_CHOICES = 128, 64
"""That Triton's kernel holds in registers."""


def router_scores(
    x: Tensor, hidden: tuple[Tensor, Tensor], scores: tuple[Tensor, Tensor], dtype: torch.dtype, *, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """(N, d) tokens, weight and bias of both maps → (N, K) scores in the wide type, and the tokens in ``dtype``.

    On a GPU in one kernel that reads the tokens once for both, unless it is to be ``plain`` torch.
    """
    fits = hidden[0].shape[0] <= MOST_HIDDEN and scores[0].shape[0] <= MOST_CHOICES
    if not plain and fits and usable(x):
        from intbmoe.ops.router import fused

        return fused.router_scores(x, hidden, scores, dtype)
    return naive.router_scores(x, hidden, scores, dtype)
