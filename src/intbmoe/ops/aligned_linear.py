"""Linear maps of any width by cuBLAS, which has only slow kernels for rows that are no multiple of 16 bytes.

Zeros, which change nothing, fill such widths up in memory where the product is large: copying tokens then costs far
less than a slow product. For small ones the copies' kernels would cost more than they save.
"""

import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.triton_support import aligned
from intbmoe.precision import cast

LARGE_PRODUCT = 2**31
"""Multiplications from which widths are filled up. Not measured: fast kernels take 6 µs for them on an H200, slow ones
at least three times as long, and the copies a few."""


def width_to_multiply(x: Tensor, outputs: int) -> int:
    """The width that (N, i) tokens should have to be multiplied to (N, outputs): i, or more."""
    count, width = x.shape
    filled = aligned(width, x.dtype)
    return width if filled == width or count * width * outputs < LARGE_PRODUCT else filled


def filled_up(x: Tensor, width: int) -> Tensor:
    """(N, c) with columns of zeros up to ``width``; itself where none is missing."""
    return x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1]))


def square_linear(x: Tensor, weight: Tensor) -> Tensor:
    """(N, d) tokens and a (d, d) weight → (N, d) in the type of ``x``."""
    weight, width = cast(weight, x.dtype), x.shape[1]
    missing = width_to_multiply(x, width) - width
    if not missing:
        return F.linear(x, weight)
    return F.linear(filled_up(x, width + missing), F.pad(weight, (0, missing, 0, missing)))[:, :width]
