"""A router's scores: two linear maps with a ReLU between them, in float32."""

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.scores import naive


def _fits(units: int, choices: int) -> bool:
    """Whether the Triton kernel can hold this in registers, and in the shared memory of small GPUs."""
    if units <= 64:
        return choices <= 128
    return units <= 128 and choices <= 64 and units * choices <= 4096


def router_scores(
    x: Tensor, hidden: tuple[Tensor, Tensor], scores: tuple[Tensor, Tensor], dtype: torch.dtype, backend: Backend
) -> tuple[Tensor, Tensor]:
    """As ``naive.router_scores``; the kernel reads the tokens once for both results."""
    if backend == "fused" and _fits(hidden[0].shape[0], scores[0].shape[0]):
        from intbmoe.ops.scores import fused

        return fused.router_scores(x, hidden, scores, dtype)
    return naive.router_scores(x, hidden, scores, dtype)
