"""Triton kernels over the rows of experts; a program has some columns of up to ``ROWS`` rows of one group.

So it reads the group's bias once, and writes one partial sum of the bias's gradient. Programs that no group needs end
at once (``tiles.py``), so rows after the last group cost nothing.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.combine import sum_rows
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.tiles import load_rows, programs, rows_of_program, sum_partials
from intbmoe.ops.triton_support import ceil_div, empty_rows, in_rows, power_of_2

ROWS, ELEMENTS, WIDEST = 64, 2048, 512  # rows of a program, entries and columns of its tiles


@triton.jit
def _store(out, row, column, stride, values, mask):
    place = row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gather(
    x, token, ends, out, X_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    _, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for start in range(first, end, TILE):
        row = start + tl.arange(0, TILE)
        mask = (row < end)[:, None] & (column < WIDTH)[None, :]
        source = tl.load(token + row, mask=row < end, other=0)
        place = source[:, None] * X_STRIDE + column[None, :]
        _store(out, row, column, OUT_STRIDE, tl.load(x + place, mask=mask, other=0.0), mask)


@triton.jit
def _activate(
    rows, bias, ends, out, ROW_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, GELU: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    if first < end:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        own_bias = tl.load(bias + group * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        for start in range(first, end, TILE):
            row = start + tl.arange(0, TILE)
            mask = (row < end)[:, None] & (column < WIDTH)[None, :]
            value = load_rows(rows, row, column, ROW_STRIDE, mask) + own_bias[None, :]
            if GELU:
                value = 0.5 * value * (1 + tl.erf(value * 0.7071067811865476))
            _store(out, row, column, OUT_STRIDE, value, mask)


@triton.jit
def _activate_backward(
    grad, rows, bias, ends, row_grad, partials,
    GRAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_GRAD_STRIDE: tl.constexpr, GELU: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    if first < end:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        own_bias = tl.load(bias + group * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        total = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        for start in range(first, end, TILE):
            row = start + tl.arange(0, TILE)
            mask = (row < end)[:, None] & (column < WIDTH)[None, :]
            dy = load_rows(grad, row, column, GRAD_STRIDE, mask)
            if GELU:
                value = load_rows(rows, row, column, ROW_STRIDE, mask) + own_bias[None, :]
                density = 0.3989422804014327 * tl.exp(-0.5 * value * value)
                dy *= 0.5 * (1 + tl.erf(value * 0.7071067811865476)) + value * density
                _store(row_grad, row, column, ROW_GRAD_STRIDE, dy, mask)
            total += dy
        place = tl.program_id(0).to(tl.int64) * WIDTH + column
        tl.store(partials + place, tl.sum(total, 0), mask=column < WIDTH)


@triton.jit
def _join(
    first_rows, second_rows, ends, out,
    FIRST_STRIDE: tl.constexpr, SECOND_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, GATE: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SiLU(first) ⊙ second with ``GATE``, else first + second."""
    begin()
    _, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for start in range(first, end, TILE):
        row = start + tl.arange(0, TILE)
        mask = (row < end)[:, None] & (column < WIDTH)[None, :]
        one = load_rows(first_rows, row, column, FIRST_STRIDE, mask)
        other = load_rows(second_rows, row, column, SECOND_STRIDE, mask)
        if GATE:
            one = one * tl.sigmoid(one) * other
        else:
            one += other
        _store(out, row, column, OUT_STRIDE, one, mask)


@triton.jit
def _gate_backward(
    grad, gates, values, ends, gate_grad, value_grad,
    GRAD_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    _, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for start in range(first, end, TILE):
        row = start + tl.arange(0, TILE)
        mask = (row < end)[:, None] & (column < WIDTH)[None, :]
        dy = load_rows(grad, row, column, GRAD_STRIDE, mask)
        gate = load_rows(gates, row, column, GATE_STRIDE, mask)
        value = load_rows(values, row, column, VALUE_STRIDE, mask)
        sigmoid = tl.sigmoid(gate)
        _store(gate_grad, row, column, OUT_STRIDE, dy * value * sigmoid * (1 + gate * (1 - sigmoid)), mask)
        _store(value_grad, row, column, OUT_STRIDE, dy * gate * sigmoid, mask)


def _launch(kernel, count: int, width: int, ends: Tensor, *tensors: Tensor, **constants: int) -> None:
    """Run ``kernel``, which takes ``tensors`` first, over ``count`` rows of ``width``, up to the last group."""
    groups = ends.shape[0]
    if count and width and groups:
        block = min(power_of_2(width, 16), WIDEST)
        sizes = {"ROWS": ROWS, "TILE": max(1, ELEMENTS // block), "BLOCK": block}
        grid = programs(count, groups, ROWS), ceil_div(width, block)
        launch(kernel, grid, *tensors, WIDTH=width, GROUPS=groups, PADDED=power_of_2(groups), **constants, **sizes)


# Rows of tokens.


def _run_gather(x, token, inverse, ends):
    x, out = in_rows(x), _allocate_gather(x, token, inverse, ends)
    _launch(_gather, *out.shape, ends, x, token, ends, out, X_STRIDE=x.stride(0), OUT_STRIDE=out.stride(0))
    return out


def _allocate_gather(x, token, inverse, ends):
    return empty_rows(x, token.shape[0], x.shape[1])


def _save_gather(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _differentiate_gather(ctx, grad):
    token, inverse, ends = ctx.saved_tensors
    return sum_rows(grad, token, inverse, "fused", ends), None, None, None


gather = define(
    "gather_rows", schema_of(_allocate_gather), _run_gather, _allocate_gather, _save_gather, _differentiate_gather
)


# Bias and GELU.


def _run_activate(rows, bias, ends, gelu):
    rows, out = in_rows(rows), _allocate_activate(rows, bias, ends, gelu)
    strides = {"ROW_STRIDE": rows.stride(0), "OUT_STRIDE": out.stride(0)}
    _launch(_activate, *rows.shape, ends, rows, bias.contiguous(), ends, out, GELU=gelu, **strides)
    return out


def _allocate_activate(rows, bias, ends, gelu: bool):
    return empty_rows(rows, *rows.shape)


def _run_activate_backward(grad, rows, bias, ends, gelu):
    (count, width), groups = rows.shape, ends.shape[0]
    row_grad, bias_grad = _allocate_activate_backward(grad, rows, bias, ends, gelu)
    if count == 0 or bias.numel() == 0:
        return row_grad, bias_grad.zero_()
    grad, rows = in_rows(grad), in_rows(rows)
    partials = rows.new_empty(programs(count, groups, ROWS), width, dtype=torch.float32)
    _launch(
        _activate_backward, count, width, ends, grad, rows, bias.contiguous(), ends, row_grad, partials,
        GRAD_STRIDE=grad.stride(0), ROW_STRIDE=rows.stride(0), ROW_GRAD_STRIDE=row_grad.stride(0), GELU=gelu,
    )  # fmt: skip
    return row_grad, bias_grad.copy_(sum_partials(partials, ends, ROWS, partials.shape[1])[0])


def _allocate_activate_backward(grad, rows, bias, ends, gelu: bool):
    # Without GELU the gradient of the rows equals that of the result, and this tensor stays empty.
    return empty_rows(rows, rows.shape[0] if gelu else 0, rows.shape[1]), bias.new_empty(bias.shape)


def _save_activate(ctx, inputs, output):
    rows, bias, ends, ctx.gelu = inputs
    ctx.save_for_backward(rows if ctx.gelu else None, bias, ends)


def _differentiate_activate(ctx, grad):
    rows, bias, ends = ctx.saved_tensors
    row_grad, bias_grad = _activate_gradient(grad, grad if rows is None else rows, bias, ends, ctx.gelu)
    return row_grad if ctx.gelu else grad, bias_grad, None, None


activate = define(
    "activate_rows", schema_of(_allocate_activate), _run_activate, _allocate_activate, _save_activate,
    _differentiate_activate,
)  # fmt: skip
_activate_gradient = define(
    "activate_rows_backward", schema_of(_allocate_activate_backward, 2), _run_activate_backward,
    _allocate_activate_backward,
)  # fmt: skip


# SwiGLU's gate.


def _run_join(first, second, ends, gate):
    first, second = in_rows(first), in_rows(second)
    out = _allocate_join(first, second, ends)
    strides = {"FIRST_STRIDE": first.stride(0), "SECOND_STRIDE": second.stride(0), "OUT_STRIDE": out.stride(0)}
    _launch(_join, *first.shape, ends, first, second, ends, out, GATE=gate, **strides)
    return out


def _allocate_join(first, second, ends):
    return empty_rows(first, *first.shape)


def _run_gate_backward(grad, gates, values, ends):
    grad, gates, values = in_rows(grad), in_rows(gates), in_rows(values)
    gate_grad, value_grad = _allocate_gate_backward(grad, gates, values, ends)
    _launch(
        _gate_backward, *gates.shape, ends, grad, gates, values, ends, gate_grad, value_grad,
        GRAD_STRIDE=grad.stride(0), GATE_STRIDE=gates.stride(0), VALUE_STRIDE=values.stride(0),
        OUT_STRIDE=gate_grad.stride(0),
    )  # fmt: skip
    return gate_grad, value_grad


def _allocate_gate_backward(grad, gates, values, ends):
    return empty_rows(gates, *gates.shape), empty_rows(gates, *gates.shape)


def _differentiate_gate(ctx, grad):
    return *_gate_gradient(grad, *ctx.saved_tensors), None


gate = define(
    "gate_rows", schema_of(_allocate_join), partial(_run_join, gate=True), _allocate_join,
    differentiate=_differentiate_gate,
)  # fmt: skip
_gate_gradient = define(
    "gate_rows_backward", schema_of(_allocate_gate_backward, 2), _run_gate_backward, _allocate_gate_backward
)


# Rows that two products read.


_add_rows = define("add_rows", schema_of(_allocate_join), partial(_run_join, gate=False), _allocate_join)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, ends):
        ctx.save_for_backward(ends)
        return rows.view_as(rows), rows.view_as(rows)

    @staticmethod
    def backward(ctx, first, second):
        return _add_rows(first, second, *ctx.saved_tensors), None


def twice(rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows for two readers; autograd would sum the gradients of all rows, even those without an expert."""
    if not (torch.is_grad_enabled() and rows.requires_grad):
        return rows, rows
    return _Twice.apply(rows, ends)
