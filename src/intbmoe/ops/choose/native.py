"""Choices without gradients on the CPU, in one call of the compiled library."""

import torch
from torch import Tensor

from intbmoe.ops.native import LIBRARY, address


def choose(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same as ``naive.choose``."""
    scores = scores.contiguous()
    tokens, blocks = scores.shape
    ids = scores.new_empty(tokens, k, dtype=torch.int64)
    weights = scores.new_empty(tokens, k)
    LIBRARY.intbmoe_route(
        scores.dtype == torch.float64, torch.get_num_threads(), tokens, blocks, k,
        address(scores, scores.dtype), address(ids, torch.int64), address(weights, scores.dtype),
    )  # fmt: skip
    return ids, weights
