"""SiLU(gate) ⊙ up on rows [gate | up], the output of one product, in one Triton kernel each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.tiles import sigmoid
from intbmoe.ops.triton_support import ceil_div, power_of_2

ELEMENTS = 1024


@triton.jit
def _places(count, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a program's entries are in the output and in the rows, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    return row[:, None] * WIDTH + column[None, :], row[:, None] * 2 * WIDTH + column[None, :], mask


@triton.jit
def _swiglu_forward(rows, out, count, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    place, source, mask = _places(count, WIDTH, TILE, BLOCK)
    gate = tl.load(rows + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(rows + source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (gate * sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(grad, rows, out, count, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    place, source, mask = _places(count, WIDTH, TILE, BLOCK)
    dy = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(rows + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(rows + source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    opened = sigmoid(gate)
    dgate = dy * up * opened * (1 + gate * (1 - opened))
    tl.store(out + source, dgate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + source + WIDTH, (dy * gate * opened).to(out.dtype.element_ty), mask=mask)


def _launch(kernel, *tensors: Tensor) -> None:
    """Run ``kernel``; its last tensor but one must be the rows."""
    count, width = tensors[-2].shape[0], tensors[-2].shape[1] // 2
    if count and width:
        block = min(power_of_2(width), ELEMENTS)
        tile = ELEMENTS // block
        grid = (ceil_div(count, tile), ceil_div(width, block))
        launch(kernel, grid, *tensors, count, WIDTH=width, TILE=tile, BLOCK=block)


def _run(rows):
    rows = rows.contiguous()
    out = _allocate(rows)
    _launch(_swiglu_forward, rows, out)
    return out


def _allocate(rows):
    return rows.new_empty(rows.shape[0], rows.shape[1] // 2)


def _run_backward(grad, rows):
    rows, out = rows.contiguous(), _allocate_backward(grad, rows)
    _launch(_swiglu_backward, grad.contiguous(), rows, out)
    return out


def _allocate_backward(grad, rows):
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _differentiate(ctx, grad):
    return swiglu_gradient(grad, *ctx.saved_tensors)


# (N, 2·h) rows [gate | up] → (N, h).
swiglu = define("swiglu", schema_of(_allocate), _run, _allocate, differentiate=_differentiate)
swiglu_gradient = define("swiglu_backward", schema_of(_allocate_backward), _run_backward, _allocate_backward)
