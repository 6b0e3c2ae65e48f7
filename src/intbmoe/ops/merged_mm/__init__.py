"""Groups of inputs, each times its own weighted mean of E matrices: the matrix product of parameter merging.

naive      all means at once, then applied                                    the specification
chunked    some means at a time, and again in the backward pass               large groups
spread     no mean: every input times all E matrices, summed by the product   small groups

The last two are functions of our own with a number of chunks that depends on sizes, so an exporter, which leaves sizes
free, and torch.func get plain operations.
"""

import torch
from torch import Tensor

from intbmoe.ops.eager import exporting, transformed
from intbmoe.ops.merged_mm import chunked, naive, spread

# Numbers that the means, or the spread inputs, of a chunk may hold (in float32 half a GiB); on a CPU what stays in its
# cache, which would be too little work for a GPU, and a compiler writes every chunk down.
MAX_NUMBERS, MAX_NUMBERS_IN_CACHE = 2**27, 2**22
# Inputs times matrices up to which a GPU spreads: there a mean is memory traffic, and narrow products are cheap. Both
# as measured on an H200 with matrices of 192 × 768 (``benchmarks/merged.py``): beyond them spreading is mostly slower.
SPREAD_PRODUCTS, SPREAD_PRODUCTS_WIDE = {torch.bfloat16: 512, torch.float16: 512}, 64


def merged_mm(z: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """As ``naive.merged_mm``, in the faster form, with a bounded number of numbers alive, in training too."""
    size, (experts, inputs, outputs) = z.shape[1], weight.shape
    if exporting() or transformed():
        single = isinstance(size, int) and size == 1  # a free size is no int, and asking it would bind it
        return spread.plain(z, a, weight) if single else naive.merged_mm(z, a, weight)
    most = MAX_NUMBERS_IN_CACHE if z.is_cpu and not torch.compiler.is_compiling() else MAX_NUMBERS
    if spreads(z, experts):
        return spread.merged_mm(z, a, weight, max(1, most // max(1, size * experts * inputs)))
    return chunked.merged_mm(z, a, weight, max(1, most // (inputs * outputs)))


def spreads(z: Tensor, experts: int) -> bool:
    """Whether groups of this size and type are spread (``benchmarks/merged.py`` compares the forms).

    Single inputs always are. On a CPU no others, though groups of two or four would mostly gain: the FLOPs of cost
    tables are those that run on a CPU, and by the methods' definition they build means.
    """
    size = z.shape[1]
    return size == 1 or (not z.is_cpu and size * experts <= SPREAD_PRODUCTS.get(z.dtype, SPREAD_PRODUCTS_WIDE))
