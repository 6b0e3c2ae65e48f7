"""torch's grouped GEMM as a custom op: opaque to the compiler, counted by the flop counter, differentiable twice.

``F.grouped_mm`` in float32 on the CPU can be neither compiled nor exported, leaves the rows after the last group
uninitialised, and wants row strides that are multiples of 16 bytes. This op hides the first, zeroes the second
and pads for the third.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# Defined by schema rather than by ``torch.library.custom_op``, whose wrapper imports the compiler at the first call
# (over a second) and costs more than a small product at every call.
torch.library.define("intbmoe::grouped_mm", "(Tensor x, Tensor weight, Tensor offsets, bool complete) -> Tensor")
torch.library.define("intbmoe::grouped_outer", "(Tensor x, Tensor grad, Tensor offsets) -> Tensor")


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, complete: bool) -> Tensor:
    """As ``naive.grouped_mm``; ``complete`` says that no row follows the last group."""
    return torch.ops.intbmoe.grouped_mm(x, weight, offsets, complete)


def grouped_outer(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """(M, i) and (M, o) rows sorted by group → (G, i, o), the sum of x ⊗ grad over each group's rows."""
    return torch.ops.intbmoe.grouped_outer(x, grad, offsets)


@torch.library.impl("intbmoe::grouped_mm", "default")
def _run_mm(x, weight, offsets, complete):
    width = weight.shape[2]
    x, weight = _align(x, 1), _align(_align(weight, 1), 2)
    if not _strides_align(weight):
        weight = weight.contiguous()
    out = F.grouped_mm(x.contiguous(), weight, offs=offsets)
    if not complete:
        tail = torch.arange(out.shape[0], device=out.device) >= offsets[-1]
        out = out.masked_fill(tail.unsqueeze(1), 0)
    return out if out.shape[1] == width else out[:, :width].contiguous()


@torch.library.impl("intbmoe::grouped_outer", "default")
def _run_outer(x, grad, offsets):
    inputs, outputs = x.shape[1], grad.shape[1]
    x, grad = _align(x, 1).contiguous(), _align(grad, 1).contiguous()
    out = F.grouped_mm(x.t(), grad, offs=offsets)
    return out[:, :inputs, :outputs].contiguous()


@torch.library.register_fake("intbmoe::grouped_mm")
def _fake_mm(x, weight, offsets, complete):
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.register_fake("intbmoe::grouped_outer")
def _fake_outer(x, grad, offsets):
    return x.new_empty(offsets.shape[0], x.shape[1], grad.shape[1])


def _save_mm(ctx, inputs, output):
    x, weight, offsets, ctx.complete = inputs
    ctx.save_for_backward(x, weight, offsets)


def _grad_mm(ctx, grad):
    x, weight, offsets = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    x_grad = grouped_mm(grad, weight.transpose(1, 2), offsets, ctx.complete) if needs_x else None
    weight_grad = grouped_outer(x, grad, offsets) if needs_weight else None
    return x_grad, weight_grad, None, None


def _save_outer(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grad_outer(ctx, outer_grad):
    x, grad, offsets = ctx.saved_tensors
    x_grad = grouped_mm(grad, outer_grad.transpose(1, 2), offsets, False)
    return x_grad, grouped_mm(x, outer_grad, offsets, False), None


torch.library.register_autograd("intbmoe::grouped_mm", _grad_mm, setup_context=_save_mm)
torch.library.register_autograd("intbmoe::grouped_outer", _grad_outer, setup_context=_save_outer)


@register_flop_formula(torch.ops.intbmoe.grouped_mm)
def _(x_shape, weight_shape, offsets_shape, complete, *, out_shape=None, **_):
    return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]


@register_flop_formula(torch.ops.intbmoe.grouped_outer)
def _(x_shape, grad_shape, offsets_shape, *, out_shape=None, **_):
    return 2 * x_shape[0] * x_shape[1] * grad_shape[1]


def _align(x: Tensor, dim: int) -> Tensor:
    """Pad ``dim`` with zeros until it spans a multiple of 16 bytes."""
    unit = 16 // x.element_size()
    missing = -x.shape[dim] % unit
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def _strides_align(weight: Tensor) -> bool:
    """Whether a (G, i, o) weight is row- or column-major, so that it needs no copy."""
    _, inputs, outputs = weight.shape
    return weight.stride() in ((inputs * outputs, outputs, 1), (inputs * outputs, 1, inputs))
