"""torch's grouped GEMM as a custom op: opaque to the compiler, counted by the flop counter, differentiable twice.

``F.grouped_mm`` in float32 on the CPU can be neither compiled nor exported, leaves the rows after the last group
uninitialised, and wants row strides that are multiples of 16 bytes. This op hides the first, zeroes the second
and copies for the third what is not so laid out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from intbmoe.ops.triton_support import ALIGNMENT, empty_matrices, empty_rows

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
    out = F.grouped_mm(_aligned_rows(x), _aligned_weight(weight), offs=offsets)
    if not complete:
        tail = torch.arange(out.shape[0], device=out.device) >= offsets[-1]
        out.masked_fill_(tail.unsqueeze(1), 0)
    return out


@torch.library.impl("intbmoe::grouped_outer", "default")
def _run_outer(x, grad, offsets):
    return F.grouped_mm(_aligned_rows(x).t(), _aligned_rows(grad), offs=offsets)


# Like torch's, outputs have rows that start at multiples of 16 bytes.
@torch.library.register_fake("intbmoe::grouped_mm")
def _fake_mm(x, weight, offsets, complete):
    return empty_rows(x, x.shape[0], weight.shape[2])


@torch.library.register_fake("intbmoe::grouped_outer")
def _fake_outer(x, grad, offsets):
    return empty_matrices(x, offsets.shape[0], x.shape[1], grad.shape[1])


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


def _aligned_rows(x: Tensor) -> Tensor:
    """``x`` (M, i) with rows that start at multiples of 16 bytes; itself where they do."""
    if x.stride(1) == 1 and _aligned(x, 0):
        return x
    return empty_rows(x, *x.shape).copy_(x)


def _aligned_weight(weight: Tensor) -> Tensor:
    """``weight`` (G, i, o), row- or column-major, rows likewise."""
    row_major = weight.stride(2) == 1 and _aligned(weight, 1)
    column_major = weight.stride(1) == 1 and _aligned(weight, 2)
    if _aligned(weight, 0) and (row_major or column_major):
        return weight
    return empty_matrices(weight, *weight.shape).copy_(weight)


def _aligned(x: Tensor, dim: int) -> bool:
    return x.stride(dim) * x.element_size() % ALIGNMENT == 0
