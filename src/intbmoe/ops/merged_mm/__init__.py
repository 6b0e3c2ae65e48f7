"""Groups of inputs, each times its own weighted mean of E matrices: the matrix product of parameter merging.

naive      all means at once, then applied                                    the specification
chunked    some means at a time, and again in the backward pass               large groups
spread     no mean: every input times all E matrices, summed by the product   small groups

The number of chunks of the last two depends on sizes. An exporter leaves sizes free, so it gets plain operations, and
so does torch.func.
"""

import torch
from torch import Tensor

from intbmoe.ops.eager import exporting, transformed
from intbmoe.ops.merged_mm import chunked, naive, spread

# How many numbers the means, or the spread inputs, of a chunk may have (half a GiB in float32). On a CPU they should
# stay in the cache; on a GPU that would be too little work, and a compiler unrolls every chunk.
MAX_NUMBERS, MAX_NUMBERS_IN_CACHE = 2**27, 2**22
# A GPU spreads up to this many inputs times matrices: there a mean is memory traffic, and narrow products are cheap.
# Measured on an H200 with matrices of 192 × 768 (``benchmarks/merged.py``): beyond this, spreading is mostly slower.
SPREAD_PRODUCTS, SPREAD_PRODUCTS_WIDE = {torch.bfloat16: 512, torch.float16: 512}, 64


def merged_mm(z: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """The same as ``naive.merged_mm``, in the faster form, with bounded memory, in training too."""
    size, (experts, inputs, outputs) = z.shape[1], weight.shape
    if exporting() or transformed():
        single = isinstance(size, int) and size == 1  # a free size is not an int, and comparing it would fix it
        return spread.plain(z, a, weight) if single else naive.merged_mm(z, a, weight)
    most = MAX_NUMBERS_IN_CACHE if z.is_cpu and not torch.compiler.is_compiling() else MAX_NUMBERS
    if spreads(z, experts):
        return spread.merged_mm(z, a, weight, max(1, most // max(1, size * experts * inputs)))
    return chunked.merged_mm(z, a, weight, max(1, most // (inputs * outputs)))


def spreads(z: Tensor, experts: int) -> bool:
    """Whether groups of this size and type are spread (``benchmarks/merged.py`` compares the forms).

    Single inputs always are. On a CPU no others are, although groups of two or four would mostly gain: the cost tables
    count the FLOPs that run on a CPU, and by definition these methods build means.
    """
    size = z.shape[1]
    return size == 1 or (not z.is_cpu and size * experts <= SPREAD_PRODUCTS.get(z.dtype, SPREAD_PRODUCTS_WIDE))
