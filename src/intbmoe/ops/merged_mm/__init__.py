"""Groups of inputs, each times its own weighted mean of E matrices: the matrix product of parameter merging."""

from torch import Tensor

from intbmoe.ops.merged_mm import chunked, naive

__all__ = ["MAX_MERGED", "merged_mm", "naive"]

MAX_MERGED = 32
"""Merged matrices alive at once; with fewer, a GPU has too little to do in one product."""


def merged_mm(z: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """As ``naive.merged_mm``, with at most ``MAX_MERGED`` merged matrices alive, in training too."""
    return chunked.merged_mm(z, a, weight, MAX_MERGED)
