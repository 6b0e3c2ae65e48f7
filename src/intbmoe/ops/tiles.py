"""What Triton kernels over rows sorted by group share: which rows a program has, and sums over a group's rows.

A program takes up to ``ROWS`` rows of one group, so that it reads the group's bias once and writes one partial sum.
Only the device knows how many programs a group needs: there are ⌈M / ROWS⌉ + G of them, enough for any routing, and
each finds its group and rows from the groups' ends.
"""

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.backend import INTERPRETING
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.triton_support import ceil_div, power_of_2

ENOUGH_WARPS = 1000  # to keep a large GPU busy
NARROW_BLOCK, WIDE_BLOCK, TOTAL_BLOCK, NARROWEST_BLOCK = (256, 32), (32, 128), (512, 16), (1024, 8)
"""Rows and columns that are added at a time; the narrower, the more programs there are. Eight columns are the least
that a GPU reads from memory."""
MOST_NARROW = 512
"""Narrow programs hold many numbers, so that a large GPU runs only about 264 of them at a time."""
_ASSEMBLY = tl.constexpr(not INTERPRETING)


class Tiling(NamedTuple):
    """How a kernel over rows is divided, whatever their width."""

    elements: int  # per tile: rows at a time, times the width rounded up to a power of two
    per_lane: int  # elements that each lane holds; the number of warps follows from it
    tiles: int = 1  # per program, which reads its bias and writes its partial sums once for all of them
    stages: int = 1  # tiles being loaded while one is computed
    pieces: tuple[int, ...] = (1,)  # allowed cuts of a row: 2844 columns take 3072 lanes in three pieces, 4096 in one
    spread: int = 1  # a program gets several tiles only if that leaves at least this many times ENOUGH_WARPS

    def cut(self, width: int) -> int:
        """Return the number of pieces that takes the fewest lanes."""
        return min(self.pieces, key=lambda pieces: pieces * power_of_2(-(-width // pieces), 16))

    def tile(self, width: int) -> dict[str, int]:
        """Return launch arguments of a program with one tile: rows, columns of a piece (rounded up), and warps."""
        return dict(_tile(self, width))

    def chunk(self, width: int, rows: int) -> dict[str, int]:
        """The same as ``tile``, for several tiles; with few rows, programs are small, to use all multiprocessors."""
        sizes = self.tile(width)
        tiles = power_below(rows * sizes["num_warps"] // (sizes["TILE"] * self.spread * ENOUGH_WARPS), self.tiles)
        return {**sizes, "ROWS": sizes["TILE"] * tiles, "STAGES": min(self.stages, tiles)}


def tiling_for(width: int, tilings: dict[int | None, Tiling]) -> Tiling:
    """Return the tiling for rows of this width; keys are the widest rows that each is for, in rising order."""
    return next(tiling for widest, tiling in tilings.items() if widest is None or width <= widest)


@cache
def _tile(tiling: Tiling, width: int) -> dict[str, int]:
    pieces = tiling.cut(width)
    block = power_of_2(-(-width // pieces), 16)
    rows = power_below(tiling.elements // (pieces * block), tiling.elements)
    warps = power_below(rows * pieces * block // (32 * tiling.per_lane), 16)
    return {"TILE": rows, "BLOCK": block, "num_warps": warps}


def power_below(number: int, most: int) -> int:
    """Return the largest power of two up to ``number``, at least 1 and at most ``most``, itself a power of two.

    It only compares, so a compiler to which the number of rows is unknown learns a range of it and not its value.
    """
    power = 1
    while power < most and 2 * power <= number:
        power *= 2
    return power


def programs(rows: int, groups: int, size: int) -> int:
    return -(-rows // size) + groups


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), as exact as ``tl.sigmoid``, which spends most of its instructions on numbers near 0 and infinity.

    Kernels over rows are bound by instructions as much as by memory.
    """
    if _ASSEMBLY:
        y = tl.inline_asm_elementwise(
            "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = tl.sigmoid(x)
    return y


@triton.jit
def relu(x):
    """max(x, 0), where NaN stays NaN, which ``tl.maximum`` makes 0 on a GPU."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def load_rows(base, row, column, stride, mask):
    """Load a tile of rows in float32."""
    place = row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(base + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tiles_of_groups(ends, GROUPS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return every group's index, first row, end, number of tiles, and number of tiles up to its last."""
    group = tl.arange(0, PADDED)
    end = tl.load(ends + group, mask=group < GROUPS, other=0)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group < GROUPS), other=0)
    tiles = tl.where(group < GROUPS, (end - start + ROWS - 1) // ROWS, 0)
    return group, start, end, tiles, tl.cumsum(tiles, 0)


@triton.jit
def rows_of_program(program, ends, GROUPS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return (group, first row, end) of a program; programs left over have no rows (first ≥ end)."""
    index, start, end, tiles, last = tiles_of_groups(ends, GROUPS, PADDED, ROWS)
    group = tl.sum((last <= program).to(tl.int32))
    mine = index == group
    first_tile = tl.sum(tl.where(mine, last - tiles, 0))
    first = tl.sum(tl.where(mine, start, 0)) + (program - first_tile) * ROWS
    return group, first, tl.minimum(first + ROWS, tl.sum(tl.where(mine, end, 0)))


@triton.jit
def _sum_rows(partials, first, stop, column, end, width, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Add the rows first … stop of some columns up to ``end``; many loads at a time, because there are few programs."""
    total = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    for start in range(first, stop, TILE):
        row = start + tl.arange(0, TILE)
        inside = (row < stop)[:, None] & (column < end)[None, :]
        total += tl.load(partials + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _sum_partials(
    partials, sums, totals, ends, own, width,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, TOTAL_TILE: tl.constexpr, TOTAL_BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    index, _, _, tiles, last = tiles_of_groups(ends, GROUPS, PADDED, ROWS)
    blocks = tl.cdiv(own, BLOCK)
    program = tl.program_id(0)
    if program < GROUPS * blocks:
        group = program // blocks
        stop = tl.sum(tl.where(index == group, last, 0))
        first = stop - tl.sum(tl.where(index == group, tiles, 0))
        column = program % blocks * BLOCK + tl.arange(0, BLOCK)
        found = _sum_rows(partials, first, stop, column, own, width, TILE, BLOCK)
        tl.store(sums + group.to(tl.int64) * own + column, found, mask=column < own)
    else:
        other = own + (program - GROUPS * blocks) * TOTAL_BLOCK + tl.arange(0, TOTAL_BLOCK)
        total = _sum_rows(partials, 0, tl.sum(tiles), other, width, width, TOTAL_TILE, TOTAL_BLOCK)
        tl.store(totals + other - own, total, mask=other < width)


def _allocate_sums(partials, ends, rows: int, own: int):
    return partials.new_empty(ends.shape[0], own), partials.new_empty(partials.shape[1] - own)


def _run_sums(partials, ends, rows, own):
    sums, totals = _allocate_sums(partials, ends, rows, own)
    groups, width = ends.shape[0], partials.shape[1]
    tile, block = NARROW_BLOCK if groups * ceil_div(own, NARROW_BLOCK[1]) <= MOST_NARROW else WIDE_BLOCK
    total_tile, total_block = TOTAL_BLOCK
    launch(
        _sum_partials, (groups * ceil_div(own, block) + ceil_div(width - own, total_block),),
        partials, sums, totals, ends, own, width,
        GROUPS=groups, PADDED=power_of_2(groups), ROWS=rows, TILE=tile, BLOCK=block,
        TOTAL_TILE=total_tile, TOTAL_BLOCK=total_block, num_warps=8,
    )  # fmt: skip
    return sums, totals


# (programs, width) partial sums of programs of ``rows`` rows → (G, own) sums of each group, for the first ``own``
# columns, and (width − own,) sums of all groups for the others; in a fixed order.
sum_partials = define("sum_partials", schema_of(_allocate_sums, 2), _run_sums, _allocate_sums)


@triton.jit
def _sum_programs(partials, sums, count, width, TILE: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + column, _sum_rows(partials, 0, count, column, width, width, TILE, BLOCK), mask=column < width)


def sum_programs(partials: Tensor) -> Tensor:
    """(programs, …) contiguous float32 → (…), ``partials.sum(0)`` in a fixed order; torch is slow for few columns."""
    sums = partials.new_empty(partials.shape[1:])
    count, width = len(partials), sums.numel()
    tile, block = NARROWEST_BLOCK if ceil_div(width, NARROWEST_BLOCK[1]) <= MOST_NARROW else NARROW_BLOCK
    tile, block = min(power_of_2(count, 16), tile), 1024 if INTERPRETING else block  # its programs run one by one
    launch(_sum_programs, (ceil_div(width, block),), partials, sums, count, width, TILE=tile, BLOCK=block, num_warps=8)
    return sums
