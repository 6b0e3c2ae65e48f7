"""Composition as one skinny matrix product in Triton, written once in the type and layout that the next product wants.

The pool is read once and the blocks are written once: coefficients (P·K, E) times the pool (E, i·o), cast, the paths of
a row side by side. Backward likewise reads the blocks' gradient and the pool once, and writes the pool's gradient, by
programs that go from columns to columns: each keeps its sum of the coefficients' gradient, and loads ahead. Their sums
are added in a fixed order. Products are in float32 (three TF32 products each on tensor cores, as exact).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from intbmoe.ops.triton_support import differentiable_once, empty_matrices, on_device, power_of_2

BLOCK = 128  # columns of a row of the pool's matrices that a program has
PRECISION = "tf32x3"
FORWARD_WARPS, BACKWARD_WARPS = 2, 1
BACKWARD_PROGRAMS = 1056  # per 32 bases: as many as run at once on an H200. A constant: sums depend on it

torch.library.define(
    "intbmoe::compose", "(Tensor value, Tensor? gate, Tensor pool, float factor, ScalarType dtype) -> Tensor"
)
torch.library.define(
    "intbmoe::compose_backward",
    "(Tensor grad, Tensor value, Tensor? gate, Tensor pool, float factor) -> (Tensor, Tensor)",
)


def compose(value: Tensor, gate: Tensor | None, pool: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Coefficients (K, E), times ``factor``, and a pool (E, i, o) → (K, i, P·o), rows aligned, in ``dtype``."""
    return torch.ops.intbmoe.compose(value, gate, pool, factor, dtype)


@triton.jit
def _coefficients(
    value, gate, factor, first, BLOCKS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr
):
    """(ROWS, STEP) coefficients of bases ``first`` …, value path first, zero past the ends."""
    row = tl.arange(0, ROWS)
    base = first + tl.arange(0, STEP)
    known = (base < E)[None, :]
    place = (row % BLOCKS)[:, None] * E + base[None, :]
    alpha = tl.load(value + place, mask=(row < BLOCKS)[:, None] & known, other=0.0).to(tl.float32)
    if gate is not None:
        second = (row >= BLOCKS) & (row < 2 * BLOCKS)
        alpha += tl.load(gate + place, mask=second[:, None] & known, other=0.0).to(tl.float32)
    return alpha * factor


@triton.jit
def _columns(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program's row of the matrices, and its columns of that row."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _composed(
    base, line, column, WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where a program's entries of all blocks and paths stand in the composed tensor, and which are there."""
    row = tl.arange(0, ROWS)
    start = (row % BLOCKS).to(tl.int64) * BLOCK_STRIDE + line * ROW_STRIDE + row // BLOCKS * WIDTH
    return base + start[:, None] + column[None, :], (row < PATHS * BLOCKS)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _compose_forward(
    value, gate, pool, out, factor, size,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    line, column = _columns(WIDTH, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for first in range(0, E, STEP):
        alpha = _coefficients(value, gate, factor, first, BLOCKS, E, ROWS, STEP)
        base = first + tl.arange(0, STEP)
        known = (base < E)[:, None] & (column < WIDTH)[None, :]
        entry = base[:, None].to(tl.int64) * size + line * WIDTH + column[None, :]
        matrix = tl.load(pool + entry, mask=known, other=0.0).to(tl.float32)
        total = tl.dot(alpha, matrix, total, input_precision=PRECISION)
    place, there = _composed(out, line, column, WIDTH, ROW_STRIDE, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
    tl.store(place, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _compose_backward(
    grad, value, gate, pool, pool_grad, partials, factor, size, items,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * STEP
    base = first + tl.arange(0, STEP)
    row = tl.arange(0, ROWS)
    alpha = tl.trans(_coefficients(value, gate, factor, first, BLOCKS, E, ROWS, STEP))
    across: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    dalpha = tl.zeros([ROWS, STEP], dtype=tl.float32)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=2):
        line = item // across
        column = item % across * BLOCK + tl.arange(0, BLOCK)
        place, there = _composed(grad, line, column, WIDTH, ROW_STRIDE, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
        dblocks = tl.load(place, mask=there, other=0.0).to(tl.float32)
        known = (base < E)[:, None] & (column < WIDTH)[None, :]
        entry = base[:, None].to(tl.int64) * size + line * WIDTH + column[None, :]
        matrix = tl.load(pool + entry, mask=known, other=0.0).to(tl.float32)
        dpool = tl.dot(alpha, dblocks, input_precision=PRECISION)
        tl.store(pool_grad + entry, dpool.to(pool_grad.dtype.element_ty), mask=known)
        dalpha = tl.dot(dblocks, tl.trans(matrix), dalpha, input_precision=PRECISION)
    partial = partials + (tl.program_id(0).to(tl.int64) * PATHS * BLOCKS + row[:, None]) * E + base[None, :]
    tl.store(partial, dalpha * factor, mask=(row < PATHS * BLOCKS)[:, None] & (base < E)[None, :])


def _sizes(value: Tensor, gate: Tensor | None, pool: Tensor, composed: Tensor) -> dict[str, Any]:
    (blocks, bases), width = value.shape, pool.shape[2]
    paths = 1 if gate is None else 2
    return {
        "WIDTH": width,
        "ROW_STRIDE": composed.stride(1),
        "BLOCK_STRIDE": composed.stride(0),
        "BLOCKS": blocks,
        "PATHS": paths,
        "E": bases,
        "ROWS": power_of_2(paths * blocks, 16),
        "STEP": min(power_of_2(bases, 16), 32),
        "BLOCK": min(BLOCK, power_of_2(width, 16)),
        "PRECISION": PRECISION,
    }


def _programs(pool: Tensor, sizes: dict[str, Any]) -> int:
    return pool.shape[1] * triton.cdiv(pool.shape[2], sizes["BLOCK"])


@torch.library.impl("intbmoe::compose", "default")
def _run(value, gate, pool, factor, dtype):
    out = _allocate(value, gate, pool, factor, dtype)
    value, pool, gate = value.contiguous(), pool.contiguous(), None if gate is None else gate.contiguous()
    sizes = _sizes(value, gate, pool, out)
    with on_device(pool):
        _compose_forward[(_programs(pool, sizes),)](
            value, gate, pool, out, factor, pool.stride(0), num_warps=FORWARD_WARPS, **sizes
        )
    return out


@torch.library.register_fake("intbmoe::compose")
def _allocate(value, gate, pool, factor, dtype):
    paths = 1 if gate is None else 2
    return empty_matrices(pool, value.shape[0], pool.shape[1], paths * pool.shape[2], dtype)


@torch.library.impl("intbmoe::compose_backward", "default")
def _run_backward(grad, value, gate, pool, factor):
    sums, pool_grad = _allocate_backward(grad, value, gate, pool, factor)
    value, pool, gate = value.contiguous(), pool.contiguous(), None if gate is None else gate.contiguous()
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    sizes = _sizes(value, gate, pool, grad)
    sizes["BLOCK"] = min(sizes["BLOCK"], 2048 // sizes["STEP"])  # more would not fit into registers
    items = _programs(pool, sizes)
    partials = sums.new_empty(min(items, BACKWARD_PROGRAMS), *sums.shape)
    with on_device(pool):
        _compose_backward[len(partials), triton.cdiv(sizes["E"], sizes["STEP"])](
            grad, value, gate, pool, pool_grad, partials, factor, pool.stride(0), items,
            num_warps=BACKWARD_WARPS, **sizes,
        )  # fmt: skip
    return partials.sum(0), pool_grad


@torch.library.register_fake("intbmoe::compose_backward")
def _allocate_backward(grad, value, gate, pool, factor):
    rows = value.shape[0] * (1 if gate is None else 2)
    pool_grad = torch.empty_like(pool, memory_format=torch.contiguous_format)
    return value.new_empty(rows, value.shape[1], dtype=torch.float32), pool_grad


def _save(ctx, inputs, output):
    value, gate, pool, ctx.factor, _ = inputs
    ctx.save_for_backward(value, gate, pool)


def _differentiate(ctx, grad):
    value, gate, pool = ctx.saved_tensors
    sums, pool_grad = torch.ops.intbmoe.compose_backward(grad, value, gate, pool, ctx.factor)
    value_grad = sums[: value.shape[0]].to(value.dtype)
    gate_grad = None if gate is None else sums[value.shape[0] :].to(gate.dtype)
    return value_grad, gate_grad, pool_grad, None, None


torch.library.register_autograd("intbmoe::compose", _differentiate, setup_context=_save)
differentiable_once("intbmoe::compose_backward")


@register_flop_formula(torch.ops.intbmoe.compose)
def _(value_shape, gate_shape, pool_shape, *_, **__):
    rows = value_shape[0] * (1 if gate_shape is None else 2)
    return 2 * rows * pool_shape[0] * pool_shape[1] * pool_shape[2]


@register_flop_formula(torch.ops.intbmoe.compose_backward)
def _(grad_shape, value_shape, gate_shape, pool_shape, *_, **__):
    rows = value_shape[0] * (1 if gate_shape is None else 2)
    return 4 * rows * pool_shape[0] * pool_shape[1] * pool_shape[2]
