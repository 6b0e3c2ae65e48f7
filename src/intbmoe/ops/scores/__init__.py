"""A router's scores: two linear maps with a ReLU between them, in float32."""

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.scores import naive

MOST_HIDDEN, MOST_CHOICES = 128, 64  # that Triton's kernel holds in registers


def router_scores(
    x: Tensor, hidden: tuple[Tensor, Tensor], scores: tuple[Tensor, Tensor], dtype: torch.dtype, backend: Backend
) -> tuple[Tensor, Tensor]:
    """As ``naive.router_scores``; the kernel reads the tokens once for both results."""
    if backend == "fused" and hidden[0].shape[0] <= MOST_HIDDEN and scores[0].shape[0] <= MOST_CHOICES:
        from intbmoe.ops.scores import fused

        return fused.router_scores(x, hidden, scores, dtype)
    return naive.router_scores(x, hidden, scores, dtype)
