"""SiLU(gate) ⊙ up on rows [gate | up], one product's output, in one Triton kernel each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.triton_support import differentiable_once, on_device, power_of_2

ELEMENTS = 1024

torch.library.define("intbmoe::swiglu", "(Tensor rows) -> Tensor")
torch.library.define("intbmoe::swiglu_backward", "(Tensor grad, Tensor rows) -> Tensor")
swiglu = torch.ops.intbmoe.swiglu  # (N, 2·h) rows [gate | up] → (N, h)


@triton.jit
def _places(count, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Where a program's entries stand in the output and among the rows, and which are there."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    return row[:, None] * WIDTH + column[None, :], row[:, None] * 2 * WIDTH + column[None, :], mask


@triton.jit
def _swiglu_forward(rows, out, count, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    place, source, mask = _places(count, WIDTH, TILE, BLOCK)
    gate = tl.load(rows + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(rows + source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(grad, rows, out, count, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    place, source, mask = _places(count, WIDTH, TILE, BLOCK)
    dy = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(rows + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(rows + source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + source, dgate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + source + WIDTH, (dy * gate * sigmoid).to(out.dtype.element_ty), mask=mask)


def _launch(kernel, *tensors: Tensor) -> None:
    """Run ``kernel``, whose last tensor but one are the rows."""
    count, width = tensors[-2].shape[0], tensors[-2].shape[1] // 2
    if count and width:
        block = min(power_of_2(width), ELEMENTS)
        tile = ELEMENTS // block
        grid = (triton.cdiv(count, tile), triton.cdiv(width, block))
        with on_device(tensors[0]):
            kernel[grid](*tensors, count, WIDTH=width, TILE=tile, BLOCK=block)


@torch.library.impl("intbmoe::swiglu", "default")
def _run(rows):
    rows = rows.contiguous()
    out = _allocate(rows)
    _launch(_swiglu_forward, rows, out)
    return out


@torch.library.register_fake("intbmoe::swiglu")
def _allocate(rows):
    return rows.new_empty(rows.shape[0], rows.shape[1] // 2)


@torch.library.impl("intbmoe::swiglu_backward", "default")
def _run_backward(grad, rows):
    rows, out = rows.contiguous(), _allocate_backward(grad, rows)
    _launch(_swiglu_backward, grad.contiguous(), rows, out)
    return out


@torch.library.register_fake("intbmoe::swiglu_backward")
def _allocate_backward(grad, rows):
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


torch.library.register_autograd(
    "intbmoe::swiglu",
    lambda ctx, grad: torch.ops.intbmoe.swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
differentiable_once("intbmoe::swiglu_backward")
