"""SiLU(gate) ⊙ up on rows [gate | up], the output of one product, in one Triton kernel each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.launch import launch
from intbmoe.ops.overlap import begin
from intbmoe.ops.tiles import sigmoid
from intbmoe.ops.triton_support import ceil_div, power_of_2

ELEMENTS = 1024


@triton.jit
def derivatives(grad, gate, up):
    """The gradients of gate and up, given that of SiLU(gate) ⊙ up."""
    opened = sigmoid(gate)
    return grad * up * opened * (1 + gate * (1 - opened)), grad * gate * opened


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
    dgate, dup = derivatives(dy, gate, up)
    tl.store(out + source, dgate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + source + WIDTH, dup.to(out.dtype.element_ty), mask=mask)


def _launch(kernel, *tensors: Tensor) -> None:
    """Run ``kernel``; its last tensor but one must be the rows."""
    count, width = tensors[-2].shape[0], tensors[-2].shape[1] // 2
    if count and width:
        block = min(power_of_2(width), ELEMENTS)
        tile = ELEMENTS // block
        grid = (ceil_div(count, tile), ceil_div(width, block))
        launch(kernel, grid, *tensors, count, WIDTH=width, TILE=tile, BLOCK=block)


def swiglu(rows: Tensor) -> Tensor:
    """(N, 2·h) rows [gate | up] → (N, h)."""
    rows = rows.contiguous()
    out = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    _launch(_swiglu_forward, rows, out)
    return out


def swiglu_gradient(grad: Tensor, rows: Tensor) -> Tensor:
    """The gradient (N, 2·h) of the rows, given that of the result."""
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    _launch(_swiglu_backward, grad.contiguous(), rows, out)
    return out
