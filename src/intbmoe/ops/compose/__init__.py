"""Merging a pool of expert bases into blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from intbmoe.ops.compose import naive

__all__ = ["compose", "naive"]


def compose(coefficients: Sequence[Tensor], pool: Tensor) -> Tensor:
    """As ``naive.compose``, reading the pool once: all paths of all blocks are the rows of one matrix product."""
    paths, blocks, bases = len(coefficients), coefficients[0].shape[0], pool.shape[0]
    merged = torch.cat(list(coefficients)) @ pool.reshape(bases, -1)
    merged = merged.view(paths, blocks, *pool.shape[1:])
    return merged.movedim(0, -2).reshape(blocks, *pool.shape[1:-1], paths * pool.shape[-1])
