"""float32 as three bfloat16 numbers, for products on tensor cores that are about as exact as in float32.

bfloat16 has the exponents of float32 and a third of its significant bits, so three pieces add up to the number exactly
(below 2^-110, which no gradient needs, the last piece is rounded). A product of a float32 and a bfloat16 matrix takes
three products of pieces, one of two float32 matrices six; the three that are left out are at most 2^-20 of the product,
and 2^-24 on average. Triton's own "bf16x6" rounds numbers one by one, which a GPU does at a quarter of its speed, and
does so for every product. Here a mask cuts the bits, and the pieces can serve several products. The pieces of infinity
are infinity and NaN, so a product with it may be NaN.
"""

import triton
import triton.language as tl

from intbmoe.ops.backend import INTERPRETING

_PIECE = tl.constexpr(tl.float32 if INTERPRETING else tl.bfloat16)  # the interpreter would multiply bfloat16's bits


@triton.jit
def _top(x):
    """The sign, exponent and first 8 significant bits of float32."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """Return the pieces of ``x``, the largest first."""
    x = x.to(tl.float32)
    high = _top(x)
    middle = _top(x - high)
    return high.to(_PIECE), middle.to(_PIECE), (x - high - middle).to(_PIECE)


@triton.jit
def transposed(pieces):
    return tl.trans(pieces[0]), tl.trans(pieces[1]), tl.trans(pieces[2])


@triton.jit
def multiply_pieces(a, b):
    """The product of two matrices in pieces; the smallest terms first."""
    total = tl.dot(a[2], b[0])
    total = tl.dot(a[0], b[2], total)
    total = tl.dot(a[1], b[1], total)
    total = tl.dot(a[1], b[0], total)
    total = tl.dot(a[0], b[1], total)
    return tl.dot(a[0], b[0], total)


@triton.jit
def multiply_short(a, b, total):
    """``total`` plus the product of two matrices, at least one of them bfloat16."""
    if a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        total = tl.dot(a.to(_PIECE), b.to(_PIECE), total)
    elif a.dtype == tl.bfloat16:
        high, middle, low = split(b)
        a = a.to(_PIECE)
        total = tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low, total)))
    else:
        high, middle, low = split(a)
        b = b.to(_PIECE)
        total = tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b, total)))
    return total
