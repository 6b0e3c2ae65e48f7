"""The three matrices of a SwiGLU network in the form that its two products need, by one Triton kernel each way.

Gate and up become one matrix [gate | up], and all are cast. Zeros, which change nothing, pad the hidden width to a
multiple of 16 bytes, because cuBLAS uses kernels three times as slow for others, and the tokens' width to the caller's.
"""

import torch
import triton
import triton.language as tl

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.triton_support import aligned, ceil_div

TILE, BLOCK = 16, 128


@triton.jit
def _move(
    source, target, number,
    FROM_ROWS: tl.constexpr, FROM_COLUMNS: tl.constexpr, TO_ROWS: tl.constexpr, TO_COLUMNS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast a tile of a matrix into another matrix, which may have more rows and columns (zeros), or fewer."""
    across: tl.constexpr = (TO_COLUMNS + BLOCK - 1) // BLOCK
    row = number // across * TILE + tl.arange(0, TILE)
    column = number % across * BLOCK + tl.arange(0, BLOCK)
    known = (row < FROM_ROWS)[:, None] & (column < FROM_COLUMNS)[None, :]
    wanted = (row < TO_ROWS)[:, None] & (column < TO_COLUMNS)[None, :]
    row = row.to(tl.int64)
    values = tl.load(source + row[:, None] * FROM_COLUMNS + column[None, :], mask=known & wanted, other=0.0)
    tl.store(target + row[:, None] * TO_COLUMNS + column[None, :], values.to(target.dtype.element_ty), mask=wanted)


@triton.jit
def _move_all(
    gate, up, down, to_gate, to_up, to_down, tiles,
    FROM_HIDDEN: tl.constexpr, FROM_WIDTH: tl.constexpr, TO_HIDDEN: tl.constexpr, TO_WIDTH: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move all three matrices; ``tiles`` is the number of tiles of the gate, which up has too."""
    begin()
    program = tl.program_id(0)
    if program < tiles:
        _move(gate, to_gate, program, FROM_HIDDEN, FROM_WIDTH, TO_HIDDEN, TO_WIDTH, TILE, BLOCK)
    elif program < 2 * tiles:
        _move(up, to_up, program - tiles, FROM_HIDDEN, FROM_WIDTH, TO_HIDDEN, TO_WIDTH, TILE, BLOCK)
    else:
        _move(down, to_down, program - 2 * tiles, FROM_WIDTH, FROM_HIDDEN, TO_WIDTH, TO_HIDDEN, TILE, BLOCK)


def _launch(sources, targets) -> None:
    (from_hidden, from_width), (to_hidden, to_width) = sources[0].shape, targets[0].shape
    tiles, down_tiles = _tiles(to_hidden, to_width), _tiles(to_width, to_hidden)
    launch(
        _move_all, (2 * tiles + down_tiles,), *sources, *targets, tiles,
        FROM_HIDDEN=from_hidden, FROM_WIDTH=from_width, TO_HIDDEN=to_hidden, TO_WIDTH=to_width, TILE=TILE, BLOCK=BLOCK,
    )  # fmt: skip


def _tiles(rows: int, columns: int) -> int:
    return ceil_div(rows, TILE) * ceil_div(columns, BLOCK)


def _run(gate, up, down, width, dtype):
    joined, filled = _allocate(gate, up, down, width, dtype)
    _launch([matrix.contiguous() for matrix in (gate, up, down)], (*joined.chunk(2), filled))
    return joined, filled


def _allocate(gate, up, down, width: int, dtype: torch.dtype):
    hidden = aligned(gate.shape[0], dtype)
    return gate.new_empty(2 * hidden, width, dtype=dtype), gate.new_empty(width, hidden, dtype=dtype)


def _run_backward(joined, filled, hidden, width, dtype):
    gradients = _allocate_backward(joined, filled, hidden, width, dtype)
    _launch([matrix.contiguous() for matrix in (*joined.chunk(2), filled)], gradients)
    return gradients


def _allocate_backward(joined, filled, hidden: int, width: int, dtype: torch.dtype):
    shapes = (hidden, width), (hidden, width), (width, hidden)
    return tuple(joined.new_empty(shape, dtype=dtype) for shape in shapes)


def _save(ctx, inputs, output):
    *matrices, _, _ = inputs
    ctx.shape, ctx.dtypes = matrices[0].shape, [matrix.dtype for matrix in matrices]


def _differentiate(ctx, joined, filled):
    gradients = _join_gradient(joined, filled, *ctx.shape, ctx.dtypes[0])
    return *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None


# (h, d), (h, d) and (d, h) → (2·h, width) and (width, h) in ``dtype``, with h rounded up.
join = define("swiglu_join", schema_of(_allocate, 2), _run, _allocate, _save, _differentiate)
_join_gradient = define("swiglu_join_backward", schema_of(_allocate_backward, 3), _run_backward, _allocate_backward)
