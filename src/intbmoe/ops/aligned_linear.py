"""Linear maps of any width by cuBLAS, whose kernels are slow for rows that are not a multiple of 16 bytes.

Large products are padded to such a multiple with zeros, which change nothing: copying the tokens then costs far less
than a slow product. For small products the copy kernels would cost more than they save.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.branches import aside, beside
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.triton_support import aligned
from intbmoe.precision import cast

LARGE_PRODUCT = 2**27
"""Multiplications from which widths are padded. Measured on an H200 in layers of width 50 to 100."""


def width_to_multiply(x: Tensor, outputs: int) -> int:
    """Return the width that (N, i) tokens should have for a product to (N, outputs): i, or more."""
    count, width = x.shape
    filled = aligned(width, x.dtype)
    return width if filled == width or count * width * outputs < LARGE_PRODUCT else filled


def filled_up(x: Tensor, width: int) -> Tensor:
    """Return (N, c) padded with columns of zeros up to ``width``; the same tensor if none is missing."""
    return x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1]))


def square_linear(x: Tensor, weight: Tensor) -> Tensor:
    """(N, d) tokens and a (d, d) weight → (N, d) in the type of ``x``."""
    weight, width = cast(weight, x.dtype), x.shape[1]
    missing = width_to_multiply(x, width) - width
    if not missing:
        plain = torch.compiler.is_compiling() or beside() is None
        return F.linear(x, weight) if plain else _linear(x, weight)
    return F.linear(filled_up(x, width + missing), F.pad(weight, (0, missing, 0, missing)))[:, :width]


# The same product, but the gradient of its weight, which nothing else waits for, is made aside.


def _allocate(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])


def _differentiate(ctx, grad):
    x, weight = ctx.saved_tensors
    x_grad = weight_grad = None
    if ctx.needs_input_grad[1]:
        with aside(ctx, x, grad):
            weight_grad = grad.t() @ x
    if ctx.needs_input_grad[0]:
        x_grad = grad @ weight
    return x_grad, weight_grad


def _flops(x_shape, weight_shape, *_, **__):
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


_linear = define("linear", schema_of(_allocate), F.linear, _allocate, differentiate=_differentiate, flops=_flops)
