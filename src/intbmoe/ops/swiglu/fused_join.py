"""The three matrices of a SwiGLU network in the form that its two products need, by one Triton kernel each way.

Gate and up become one matrix [gate | up], and all are cast. Zeros, which change nothing, pad the hidden width to a
multiple of 16 bytes, because cuBLAS uses kernels three times as slow for others, and the tokens' width to the caller's.
The way back can also add up parts, where sums over tokens were cut (``fused_weights.py``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.launch import launch
from intbmoe.ops.overlap import begin
from intbmoe.ops.triton_support import aligned, ceil_div

TILE, BLOCK = 16, 128
TILE_OF_PARTS = 4
"""Narrow matrices have few tiles, and with parts each reads much, so that there should be more of them."""


@triton.jit
def _move(
    source, target, number,
    FROM_ROWS: tl.constexpr, FROM_COLUMNS: tl.constexpr, TO_ROWS: tl.constexpr, TO_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, APART: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast a tile of a matrix into another matrix, which may have more rows and columns (zeros), or fewer.

    The matrix is the sum of PARTS, APART entries from one another, which are added in the same order every time.
    """
    across: tl.constexpr = (TO_COLUMNS + BLOCK - 1) // BLOCK
    row = number // across * TILE + tl.arange(0, TILE)
    column = number % across * BLOCK + tl.arange(0, BLOCK)
    known = (row < FROM_ROWS)[:, None] & (column < FROM_COLUMNS)[None, :]
    wanted = (row < TO_ROWS)[:, None] & (column < TO_COLUMNS)[None, :]
    row = row.to(tl.int64)
    place = source + row[:, None] * FROM_COLUMNS + column[None, :]
    values = tl.load(place, mask=known & wanted, other=0.0)
    for part in tl.static_range(1, PARTS):
        values += tl.load(place + part * APART, mask=known & wanted, other=0.0)
    tl.store(target + row[:, None] * TO_COLUMNS + column[None, :], values.to(target.dtype.element_ty), mask=wanted)


@triton.jit
def _move_all(
    gate, up, down, to_gate, to_up, to_down, tiles,
    FROM_HIDDEN: tl.constexpr, FROM_WIDTH: tl.constexpr, TO_HIDDEN: tl.constexpr, TO_WIDTH: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move all three matrices; ``tiles`` is the number of tiles of the gate, which up has too.

    With PARTS, those of gate and up lie in turn, those of down by themselves.
    """
    begin()
    program = tl.program_id(0)
    size: tl.constexpr = FROM_HIDDEN * FROM_WIDTH
    if program < tiles:
        _move(gate, to_gate, program, FROM_HIDDEN, FROM_WIDTH, TO_HIDDEN, TO_WIDTH, PARTS, 2 * size, TILE, BLOCK)
    elif program < 2 * tiles:
        _move(up, to_up, program - tiles, FROM_HIDDEN, FROM_WIDTH, TO_HIDDEN, TO_WIDTH, PARTS, 2 * size, TILE, BLOCK)
    else:
        program -= 2 * tiles
        _move(down, to_down, program, FROM_WIDTH, FROM_HIDDEN, TO_WIDTH, TO_HIDDEN, PARTS, size, TILE, BLOCK)


def _launch(sources, targets, parts: int = 1) -> None:
    (from_hidden, from_width), (to_hidden, to_width) = sources[0].shape, targets[0].shape
    tile = TILE if parts == 1 else TILE_OF_PARTS
    tiles, down_tiles = _tiles(to_hidden, to_width, tile), _tiles(to_width, to_hidden, tile)
    launch(
        _move_all, (2 * tiles + down_tiles,), *sources, *targets, tiles,
        FROM_HIDDEN=from_hidden, FROM_WIDTH=from_width, TO_HIDDEN=to_hidden, TO_WIDTH=to_width,
        PARTS=parts, TILE=tile, BLOCK=BLOCK,
    )  # fmt: skip


def _tiles(rows: int, columns: int, tile: int) -> int:
    return ceil_div(rows, tile) * ceil_div(columns, BLOCK)


def join(gate: Tensor, up: Tensor, down: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(h, d), (h, d) and (d, h) → (2·h, width) and (width, h) in ``dtype``, with h rounded up."""
    joined, filled = allocate_joined(gate, width, dtype)
    _launch([matrix.contiguous() for matrix in (gate, up, down)], (*joined.chunk(2), filled))
    return joined, filled


def allocate_joined(gate: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    hidden = aligned(gate.shape[0], dtype)
    return gate.new_empty(2 * hidden, width, dtype=dtype), gate.new_empty(width, hidden, dtype=dtype)


def separate(joined: Tensor, filled: Tensor, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write the sums of contiguous (P, 2·h, width) and (P, width, h) parts into gradients of gate, up and down."""
    _launch((*joined[0].chunk(2), filled[0]), gradients, parts=joined.shape[0])
