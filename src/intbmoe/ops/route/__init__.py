"""From scores to choices: the k highest, ties to the lower index, each with its entry of the softmax over all."""

from torch import Tensor

from intbmoe.ops import native as native_library
from intbmoe.ops.route import naive, native
from intbmoe.ops.triton_support import usable

__all__ = ["MOST_IN_ONE_KERNEL", "naive", "native", "route"]

MOST_IN_ONE_KERNEL = 8
"""Choices that Triton's kernel takes one after another; for more a sort is better."""


def route(scores: Tensor, k: int, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """As ``naive.route``; on a GPU in one kernel, on the CPU without gradients in one call, unless ``plain`` torch."""
    if plain:
        return naive.route(scores, k)
    if k <= MOST_IN_ONE_KERNEL and usable(scores):
        from intbmoe.ops.route import fused

        return fused.route(scores, k)
    if native_library.usable(scores):
        return native.route(scores, k)
    return naive.route(scores, k)
