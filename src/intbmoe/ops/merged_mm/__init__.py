"""Groups of inputs, each times its own weighted mean of E matrices: the matrix product of parameter merging.

naive      all means at once, then applied                                    the specification
chunked    some means at a time, and again in the backward pass               large groups
spread     no mean: every input times all E matrices, summed by the product   small groups
"""

from torch import Tensor

from intbmoe.ops.merged_mm import chunked, naive, spread

__all__ = ["chunked", "merged_mm", "naive", "spread"]

MAX_NUMBERS = {"cpu": 2**22, "cuda": 2**27}
"""Numbers that the means, or the spread inputs, of one chunk may hold: small ones stay in a CPU's cache, but leave a
GPU with too little to do."""
SPREAD_INPUTS = 4
"""Inputs in a group up to which spreading is faster anywhere (both forms take time in proportion to E on a CPU)."""
SPREAD_PRODUCTS = 512
"""Inputs times matrices up to which it is faster on a GPU, where means cost memory traffic, and products little."""


def merged_mm(z: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """As ``naive.merged_mm``, in the faster form; little is alive beside inputs and outputs, in training too."""
    size, (experts, inputs, outputs) = z.shape[1], weight.shape
    most = MAX_NUMBERS.get(z.device.type, MAX_NUMBERS["cuda"])
    if size <= SPREAD_INPUTS or (z.is_cuda and size * experts <= SPREAD_PRODUCTS):
        return spread.merged_mm(z, a, weight, max(1, most // max(1, size * experts * inputs)))
    return chunked.merged_mm(z, a, weight, max(1, most // (inputs * outputs)))
