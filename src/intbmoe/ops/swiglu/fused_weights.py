"""The gradients of a SwiGLU network's three matrices: few entries, each a sum over all tokens.

cuBLAS cuts each product's sum into parts that it adds with a kernel of its own, and another kernel brings the results
into the form of the matrices. For narrow networks, which are bound by launches, two kernels do all of that: one makes
parts of both products, and the one that brings them into form adds them. Elsewhere cuBLAS is faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.grouped_mm.fused import PROCESSORS, describable, described
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.swiglu.fused_join import separate
from intbmoe.ops.triton_support import aligned, ceil_div, power_of_2, shared_memory

OUTPUTS, INPUTS, TOKENS, WARPS, STAGES = 128, 128, 64, 4, 3
"""Entries of a tile of the hidden units and of the tokens' width, and tokens at a time. On an H200 the two kernels took
7.4 to 10.5 µs where cuBLAS's five took 15 to 17. Tiles of 64 were a microsecond faster alone."""
SHARED = 101_376
"""Bytes of shared memory that a program may need."""
MOST_ENTRIES, MOST_PARTS, FEWEST_STEPS = 2**16, 16, 4
"""Entries of a matrix for which the kernels are used (192 × 512 gained nothing), parts of a sum, steps of a part."""


def _suits(*factors: Tensor) -> bool:
    """Whether the kernel supports the factors of both products, and is faster than cuBLAS."""
    hidden_grad, x, *_ = factors
    # The result's rows must be aligned too, which a single row of x need not be.
    narrow = hidden_grad.shape[1] // 2 * x.shape[1] <= MOST_ENTRIES and x.shape[1] == aligned(x.shape[1], x.dtype)
    able = x.dtype.itemsize == 2 and all(map(describable, factors)) and shared_memory(x.device) >= SHARED
    return narrow and able and len(x) > 0


@triton.jit
def _part(
    outputs, inputs, row, column, first, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the transposed (tokens, outputs) times (tokens, inputs), summed over tokens from ``first`` on."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        token = first + step * BLOCK_K
        total = tl.dot(outputs.load([token, row]).T, inputs.load([token, column]), total)
    return total


@triton.jit
def _parts(
    hidden_grad, x, inner, grad,  # descriptors of (N, 2·h), (N, d), (N, h) and (N, d)
    joined, filled,  # of (P, 2·h, d) and (P, d, h) results
    tiles, ACROSS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Make a tile of one part: the first ``tiles`` are those of [gate | up], ACROSS side by side, then those of down.

    A descriptor reads tokens after the last one as zeros.
    """
    begin()
    tile, part = tl.program_id(0), tl.program_id(1)
    first = part * STEPS * BLOCK_K
    if tile < tiles:
        row, column = tile // ACROSS * BLOCK_M, tile % ACROSS * BLOCK_N
        total = _part(hidden_grad, x, row, column, first, STEPS, BLOCK_M, BLOCK_N, BLOCK_K)
        joined.store([part, row, column], total.reshape(1, BLOCK_M, BLOCK_N))
    else:
        tile -= tiles
        row, column = tile // ACROSS * BLOCK_M, tile % ACROSS * BLOCK_N
        total = _part(inner, grad, row, column, first, STEPS, BLOCK_M, BLOCK_N, BLOCK_K)
        filled.store([part, column, row], total.T.reshape(1, BLOCK_N, BLOCK_M))


def _make_parts(hidden_grad: Tensor, x: Tensor, inner: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    (tokens, width), hidden = x.shape, inner.shape[1]
    n = min(INPUTS, power_of_2(width, 16))
    across = ceil_div(width, n)
    tiles, down_tiles = ceil_div(2 * hidden, OUTPUTS) * across, ceil_div(hidden, OUTPUTS) * across
    # As many parts as fill the device, because each costs a write and a read of all entries.
    steps = ceil_div(tokens, TOKENS)
    steps = max(FEWEST_STEPS, ceil_div(steps, min(MOST_PARTS, ceil_div(2 * PROCESSORS, tiles + down_tiles))))
    parts = ceil_div(tokens, steps * TOKENS)
    joined = x.new_empty(parts, 2 * hidden, width, dtype=torch.float32)
    filled = x.new_empty(parts, width, hidden, dtype=torch.float32)
    outputs, inputs = (TOKENS, OUTPUTS), (TOKENS, n)
    launch(
        _parts, (tiles + down_tiles, parts),
        described(hidden_grad, outputs), described(x, inputs), described(inner, outputs), described(grad, inputs),
        described(joined, (1, OUTPUTS, n)), described(filled, (1, n, OUTPUTS)), tiles,
        ACROSS=across, STEPS=steps, BLOCK_M=OUTPUTS, BLOCK_N=n, BLOCK_K=TOKENS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return joined, filled


def _run_products(hidden_grad, x, inner, grad):
    return hidden_grad.t() @ x, grad.t() @ inner


def _allocate_products(hidden_grad, x, inner, grad):
    return x.new_empty(hidden_grad.shape[1], x.shape[1]), x.new_empty(x.shape[1], inner.shape[1])


def _run(hidden_grad, x, inner, grad, hidden, width, dtype):
    grad = grad.contiguous()
    if _suits(hidden_grad, x, inner, grad):
        joined, filled = _make_parts(hidden_grad, x, inner, grad)
    else:
        joined, filled = (each[None] for each in _run_products(hidden_grad, x, inner, grad))
    gradients = _allocate(hidden_grad, x, inner, grad, hidden, width, dtype)
    separate(joined, filled, gradients)
    return gradients


def _allocate(hidden_grad, x, inner, grad, hidden: int, width: int, dtype: torch.dtype):
    shapes = (hidden, width), (hidden, width), (width, hidden)
    return tuple(x.new_empty(shape, dtype=dtype) for shape in shapes)


def _flops(hidden_grad_shape, x_shape, inner_shape, *_, **__):
    return 2 * x_shape[0] * x_shape[1] * (hidden_grad_shape[1] + inner_shape[1])


# (N, 2·h) gradients [gate | up], (N, d) tokens, (N, h) inputs and (N, d) gradient of the last product → the gradients
# (2·h, d) and (d, h) of the joined matrices. It is an operation so that a second derivative is refused: autograd would
# differentiate torch's products, but not what forward has kept for them.
products = define("swiglu_products", schema_of(_allocate_products, 2), _run_products, _allocate_products, flops=_flops)

# The same → the gradients of all three matrices, in ``dtype``, of ``hidden`` units and ``width`` columns, which may be
# fewer.
weight_gradients = define("swiglu_weight_gradients", schema_of(_allocate, 3), _run, _allocate, flops=_flops)
