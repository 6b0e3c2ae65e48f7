"""Composition as one matrix product in Triton, written once in the type and layout that the next product wants.

The product is coefficients (P·K, E) times the pool (E, i·o), cast, the paths of a row side by side. It is as exact as
in float32, from several products on tensor cores: three of TF32, or six of bfloat16 where the arithmetic is what takes
the time (twice as fast on an H200).

**Few rows** (P·K ≤ ``FEW_ROWS``): the product is skinny. The pool is read once and the blocks are written once.
Backward likewise reads the blocks' gradient and the pool once, and writes the pool's gradient, by programs that go from
columns to columns: each keeps its sum of the coefficients' gradient, and loads ahead.

**Many rows** would not fit into a program's registers. Each program has a tile of them, and backward is two products:
one for the pool, one for the coefficients. Tiles of the same columns run side by side and find them in the L2 cache.

A program has ``BLOCK`` columns of one line of the matrices, or, where lines do not start at multiples of 16 bytes
(``FLAT``), as many entries of a whole matrix: then at least the pool, the largest tensor here, is read in whole words.

Partial sums of the coefficients' gradient are added in a fixed order.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.backend import INTERPRETING
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.triton_support import ALIGNMENT, ceil_div, empty_matrices, power_of_2

BLOCK = 128  # columns of a row of the pool's matrices that a program has
FEW_PRECISION, MANY_PRECISION = "tf32x3", "ieee" if INTERPRETING else "bf16x6"  # the interpreter has no bfloat16 ones
FORWARD_WARPS, BACKWARD_WARPS = 2, 1
BACKWARD_PROGRAMS = 1056  # per 32 bases: as many as run at once on an H200. A constant: sums depend on it
FEW_ROWS = 16


class Cut(NamedTuple):
    """What a program of a product with many rows computes at a time."""

    rows: int
    bases: int
    columns: int
    warps: int


# Measured on an H200.
FORWARD_CUT = Cut(rows=64, bases=32, columns=128, warps=4)
POOL_CUT = Cut(rows=32, bases=64, columns=128, warps=4)
COEFFICIENT_CUT = Cut(rows=64, bases=64, columns=64, warps=4)


@triton.jit
def _coefficients(
    value, gate, factor, first_row, first, BLOCKS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr
):
    """(ROWS, STEP) coefficients: rows ``first_row`` …, value path first, of bases ``first`` …; zero past the ends."""
    row = first_row + tl.arange(0, ROWS)
    base = first + tl.arange(0, STEP)
    known = (base < E)[None, :]
    place = (row % BLOCKS)[:, None] * E + base[None, :]
    alpha = tl.load(value + place, mask=(row < BLOCKS)[:, None] & known, other=0.0).to(tl.float32)
    if gate is not None:
        second = (row >= BLOCKS) & (row < 2 * BLOCKS)
        alpha += tl.load(gate + place, mask=second[:, None] & known, other=0.0).to(tl.float32)
    return alpha * factor


@triton.jit
def _entries(item, size, WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """Where an item's entries stand in a base's matrix and in a composed one, and which are there."""
    if FLAT:
        entry = item * BLOCK + tl.arange(0, BLOCK)
        return entry, entry // WIDTH * ROW_STRIDE + entry % WIDTH, entry < size
    across: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    line = item // across
    column = item % across * BLOCK + tl.arange(0, BLOCK)
    return line * WIDTH + column, line * ROW_STRIDE + column, column < WIDTH


@triton.jit
def _matrices(pool, first, entry, inside, size, E: tl.constexpr, STEP: tl.constexpr):
    """Where the entries of bases ``first`` … stand in the pool, and which are there."""
    base = first + tl.arange(0, STEP)
    return pool + base[:, None].to(tl.int64) * size + entry[None, :], (base < E)[:, None] & inside[None, :]


@triton.jit
def _composed(
    out, first_row, entry, inside, WIDTH: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where the entries of rows ``first_row`` … stand in the composed tensor, and which are there."""
    row = first_row + tl.arange(0, ROWS)
    start = (row % BLOCKS).to(tl.int64) * BLOCK_STRIDE + row // BLOCKS * WIDTH
    return out + start[:, None] + entry[None, :], (row < PATHS * BLOCKS)[:, None] & inside[None, :]


@triton.jit
def _compose_forward(
    value, gate, pool, out, factor, size,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (PATHS * BLOCKS + ROWS - 1) // ROWS
    first_row = tl.program_id(0) % tiles * ROWS
    entry, place, inside = _entries(tl.program_id(0) // tiles, size, WIDTH, ROW_STRIDE, BLOCK, FLAT)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for first in range(0, E, STEP):
        alpha = _coefficients(value, gate, factor, first_row, first, BLOCKS, E, ROWS, STEP)
        source, known = _matrices(pool, first, entry, inside, size, E, STEP)
        matrix = tl.load(source, mask=known, other=0.0).to(tl.float32)
        total = tl.dot(alpha, matrix, total, input_precision=PRECISION)
    target, there = _composed(out, first_row, place, inside, WIDTH, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
    tl.store(target, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _compose_backward(
    grad, value, gate, pool, pool_grad, partials, factor, size, items,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * STEP
    base = first + tl.arange(0, STEP)
    row = tl.arange(0, ROWS)
    alpha = tl.trans(_coefficients(value, gate, factor, 0, first, BLOCKS, E, ROWS, STEP))
    dalpha = tl.zeros([ROWS, STEP], dtype=tl.float32)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=2):
        entry, place, inside = _entries(item, size, WIDTH, ROW_STRIDE, BLOCK, FLAT)
        composed, there = _composed(grad, 0, place, inside, WIDTH, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
        dblocks = tl.load(composed, mask=there, other=0.0).to(tl.float32)
        source, known = _matrices(pool, first, entry, inside, size, E, STEP)
        matrix = tl.load(source, mask=known, other=0.0).to(tl.float32)
        dpool = tl.dot(alpha, dblocks, input_precision=PRECISION)
        target, _ = _matrices(pool_grad, first, entry, inside, size, E, STEP)
        tl.store(target, dpool.to(pool_grad.dtype.element_ty), mask=known)
        dalpha = tl.dot(dblocks, tl.trans(matrix), dalpha, input_precision=PRECISION)
    partial = partials + (tl.program_id(0).to(tl.int64) * PATHS * BLOCKS + row[:, None]) * E + base[None, :]
    tl.store(partial, dalpha * factor, mask=(row < PATHS * BLOCKS)[:, None] & (base < E)[None, :])


@triton.jit
def _pool_gradient(
    grad, value, gate, pool_grad, factor, size,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (E + STEP - 1) // STEP
    first = tl.program_id(0) % tiles * STEP
    entry, place, inside = _entries(tl.program_id(0) // tiles, size, WIDTH, ROW_STRIDE, BLOCK, FLAT)
    total = tl.zeros([STEP, BLOCK], dtype=tl.float32)
    for first_row in range(0, PATHS * BLOCKS, ROWS):
        alpha = tl.trans(_coefficients(value, gate, factor, first_row, first, BLOCKS, E, ROWS, STEP))
        composed, there = _composed(grad, first_row, place, inside, WIDTH, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
        dblocks = tl.load(composed, mask=there, other=0.0).to(tl.float32)
        total = tl.dot(alpha, dblocks, total, input_precision=PRECISION)
    target, known = _matrices(pool_grad, first, entry, inside, size, E, STEP)
    tl.store(target, total.to(pool_grad.dtype.element_ty), mask=known)


@triton.jit
def _coefficient_gradient(
    grad, pool, partials, factor, size, items,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (E + STEP - 1) // STEP
    first = tl.program_id(0) % tiles * STEP
    first_row = tl.program_id(0) // tiles * ROWS
    total = tl.zeros([ROWS, STEP], dtype=tl.float32)
    for item in tl.range(tl.program_id(1), items, tl.num_programs(1), num_stages=2):
        entry, place, inside = _entries(item, size, WIDTH, ROW_STRIDE, BLOCK, FLAT)
        composed, there = _composed(grad, first_row, place, inside, WIDTH, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
        dblocks = tl.load(composed, mask=there, other=0.0).to(tl.float32)
        source, known = _matrices(pool, first, entry, inside, size, E, STEP)
        matrix = tl.load(source, mask=known, other=0.0).to(tl.float32)
        total = tl.dot(dblocks, tl.trans(matrix), total, input_precision=PRECISION)
    row, base = first_row + tl.arange(0, ROWS), first + tl.arange(0, STEP)
    partial = partials + (tl.program_id(1).to(tl.int64) * PATHS * BLOCKS + row[:, None]) * E + base[None, :]
    tl.store(partial, total * factor, mask=(row < PATHS * BLOCKS)[:, None] & (base < E)[None, :])


def _sizes(value: Tensor, gate: Tensor | None, pool: Tensor, composed: Tensor, cut: Cut | None) -> dict[str, Any]:
    """Launch arguments, by the ``cut``; without one, for few rows, a program has all of them."""
    (blocks, bases), width = value.shape, pool.shape[2]
    paths = 1 if gate is None else 2
    rows, precision = power_of_2(paths * blocks, 16), FEW_PRECISION if cut is None else MANY_PRECISION
    cut = cut or Cut(rows, 32, BLOCK, FORWARD_WARPS)
    flat = width % (ALIGNMENT // pool.element_size()) != 0 and pool.shape[1] > 1
    return {
        "WIDTH": width,
        "ROW_STRIDE": composed.stride(1),
        "BLOCK_STRIDE": composed.stride(0),
        "BLOCKS": blocks,
        "PATHS": paths,
        "E": bases,
        "ROWS": min(rows, cut.rows),
        "STEP": min(power_of_2(bases, 16), cut.bases),
        "BLOCK": cut.columns if flat else min(cut.columns, power_of_2(width, 16)),
        "FLAT": flat,
        "PRECISION": precision,
        "num_warps": cut.warps,
    }


def _many(value: Tensor, gate: Tensor | None) -> bool:
    return value.shape[0] * (1 if gate is None else 2) > FEW_ROWS


def _items(pool: Tensor, sizes: dict[str, Any]) -> int:
    if sizes["FLAT"]:
        return ceil_div(pool.shape[1] * pool.shape[2], sizes["BLOCK"])
    return pool.shape[1] * ceil_div(pool.shape[2], sizes["BLOCK"])


def _row_tiles(sizes: dict[str, Any]) -> int:
    return ceil_div(sizes["PATHS"] * sizes["BLOCKS"], sizes["ROWS"])


def _run(value, gate, pool, factor, dtype):
    out = _allocate(value, gate, pool, factor, dtype)
    value, pool, gate = value.contiguous(), pool.contiguous(), None if gate is None else gate.contiguous()
    sizes = _sizes(value, gate, pool, out, FORWARD_CUT if _many(value, gate) else None)
    launch(
        _compose_forward, (_items(pool, sizes) * _row_tiles(sizes),),
        value, gate, pool, out, factor, pool.stride(0), **sizes,
    )  # fmt: skip
    return out


def _allocate(value, gate, pool, factor: float, dtype: torch.dtype):
    paths = 1 if gate is None else 2
    return empty_matrices(pool, value.shape[0], pool.shape[1], paths * pool.shape[2], dtype)


def _run_backward(grad, value, gate, pool, factor):
    sums, pool_grad = _allocate_backward(grad, value, gate, pool, factor)
    value, pool, gate = value.contiguous(), pool.contiguous(), None if gate is None else gate.contiguous()
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    size = pool.stride(0)
    if _many(value, gate):
        sizes = _sizes(value, gate, pool, grad, POOL_CUT)
        launch(
            _pool_gradient, (_items(pool, sizes) * ceil_div(sizes["E"], sizes["STEP"]),),
            grad, value, gate, pool_grad, factor, size, **sizes,
        )  # fmt: skip
        sizes = _sizes(value, gate, pool, grad, COEFFICIENT_CUT)
        items, tiles = _items(pool, sizes), _row_tiles(sizes) * ceil_div(sizes["E"], sizes["STEP"])
        partials = sums.new_empty(min(items, ceil_div(BACKWARD_PROGRAMS, tiles)), *sums.shape)
        launch(_coefficient_gradient, (tiles, len(partials)), grad, pool, partials, factor, size, items, **sizes)
    else:
        sizes = _sizes(value, gate, pool, grad, None)
        sizes["BLOCK"] = min(sizes["BLOCK"], 2048 // sizes["STEP"])  # more would not fit into registers
        sizes["num_warps"] = BACKWARD_WARPS
        items = _items(pool, sizes)
        partials = sums.new_empty(min(items, BACKWARD_PROGRAMS), *sums.shape)
        launch(
            _compose_backward, (len(partials), ceil_div(sizes["E"], sizes["STEP"])),
            grad, value, gate, pool, pool_grad, partials, factor, size, items, **sizes,
        )  # fmt: skip
    return partials.sum(0), pool_grad


def _allocate_backward(grad, value, gate, pool, factor: float):
    rows = value.shape[0] * (1 if gate is None else 2)
    pool_grad = torch.empty_like(pool, memory_format=torch.contiguous_format)
    return value.new_empty(rows, value.shape[1], dtype=torch.float32), pool_grad


def _save(ctx, inputs, output):
    value, gate, pool, ctx.factor, _ = inputs
    ctx.save_for_backward(value, gate, pool)


def _differentiate(ctx, grad):
    value, gate, pool = ctx.saved_tensors
    sums, pool_grad = compose_gradient(grad, value, gate, pool, ctx.factor)
    value_grad = sums[: value.shape[0]].to(value.dtype)
    gate_grad = None if gate is None else sums[value.shape[0] :].to(gate.dtype)
    return value_grad, gate_grad, pool_grad, None, None


def _flops(value_shape, gate_shape, pool_shape, *_, **__):
    rows = value_shape[0] * (1 if gate_shape is None else 2)
    return 2 * rows * pool_shape[0] * pool_shape[1] * pool_shape[2]


# Coefficients (K, E), times a factor, and a pool (E, i, o) → (K, i, P·o), rows aligned, in ``dtype``.
compose = define("compose", schema_of(_allocate), _run, _allocate, _save, _differentiate, _flops)
compose_gradient = define(
    "compose_backward",
    schema_of(_allocate_backward, 2),
    _run_backward,
    _allocate_backward,
    flops=lambda grad_shape, *shapes, **rest: 2 * _flops(*shapes, **rest),
)
