"""From scores to choices: the k highest, ties to the lower index, each with its probability in the softmax over all."""

from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.choose import naive, native

MOST_IN_ONE_KERNEL = 8  # choices that Triton's kernel makes one after another; for more, a sort is better


def choose(scores: Tensor, k: int, backend: Backend) -> tuple[Tensor, Tensor]:
    """The same as ``naive.choose``."""
    if backend == "fused" and k <= MOST_IN_ONE_KERNEL:
        from intbmoe.ops.choose import fused

        return fused.choose(scores, k)
    return (native if backend == "native" else naive).choose(scores, k)
