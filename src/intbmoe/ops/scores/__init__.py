"""A router's scores: two linear maps with a ReLU between them, in float32."""

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.scores import naive

MOST_HIDDEN, MOST_CHOICES = 128, 64  # that the Triton kernel can hold in registers
MOST_WEIGHTS = 4096  # the product of both: more fits only into the shared memory of the largest GPUs


def router_scores(
    x: Tensor, hidden: tuple[Tensor, Tensor], scores: tuple[Tensor, Tensor], dtype: torch.dtype, backend: Backend
) -> tuple[Tensor, Tensor]:
    """As ``naive.router_scores``; the kernel reads the tokens once for both results."""
    units, choices = hidden[0].shape[0], scores[0].shape[0]
    small = units <= MOST_HIDDEN and choices <= MOST_CHOICES and units * choices <= MOST_WEIGHTS
    if backend == "fused" and small:
        from intbmoe.ops.scores import fused

        return fused.router_scores(x, hidden, scores, dtype)
    return naive.router_scores(x, hidden, scores, dtype)
