"""One Triton kernel each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.triton_support import on_device

BLOCK = 1024

torch.library.define("intbmoe::swiglu", "(Tensor rows) -> Tensor")
torch.library.define("intbmoe::swiglu_backward", "(Tensor grad, Tensor rows) -> Tensor")


def swiglu(rows: Tensor) -> Tensor:
    """(N, 2·h) rows [gate | up] → (N, h)."""
    return torch.ops.intbmoe.swiglu(rows)


@triton.jit
def _swiglu_forward(rows, out, total, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    source = place // width * 2 * width + place % width
    gate = tl.load(rows + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(rows + source + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(grad, rows, out, total, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    source = place // width * 2 * width + place % width
    dy = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(rows + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(rows + source + width, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + source, dgate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + source + width, (dy * gate * sigmoid).to(out.dtype.element_ty), mask=mask)


@torch.library.impl("intbmoe::swiglu", "default")
def _run(rows):
    rows = rows.contiguous()
    out = _allocate(rows)
    if out.numel():
        with on_device(rows):
            _swiglu_forward[(triton.cdiv(out.numel(), BLOCK),)](rows, out, out.numel(), out.shape[1], BLOCK=BLOCK)
    return out


@torch.library.register_fake("intbmoe::swiglu")
def _allocate(rows):
    return rows.new_empty(rows.shape[0], rows.shape[1] // 2)


@torch.library.impl("intbmoe::swiglu_backward", "default")
def _run_backward(grad, rows):
    rows, grad = rows.contiguous(), grad.contiguous()
    out = torch.empty_like(rows)
    if grad.numel():
        with on_device(rows):
            _swiglu_backward[(triton.cdiv(grad.numel(), BLOCK),)](
                grad, rows, out, grad.numel(), grad.shape[1], BLOCK=BLOCK
            )
    return out


@torch.library.register_fake("intbmoe::swiglu_backward")
def _(grad, rows):
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


torch.library.register_autograd(
    "intbmoe::swiglu",
    lambda ctx, grad: torch.ops.intbmoe.swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
