"""A grouped product and its weight gradient as custom ops, around whatever computes the two.

Opaque to the compiler, counted by the flop counter, differentiable twice. Defined by schema rather than by
``torch.library.custom_op``, whose wrapper imports the compiler at the first call (over a second) and costs more than a
small product at every call.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from intbmoe.ops.triton_support import empty_matrices, empty_rows


def define(mm: str, outer: str, run_mm: Callable[..., Tensor], run_outer: Callable[..., Tensor]) -> None:
    """Make ``run_mm(x, weight, offsets, complete)`` the op ``intbmoe::mm``, ``run_outer(x, grad, offsets)`` the other.

    Both must give rows that start at multiples of 16 bytes, as torch's grouped GEMM does.
    """
    torch.library.define(f"intbmoe::{mm}", "(Tensor x, Tensor weight, Tensor offsets, bool complete) -> Tensor")
    torch.library.define(f"intbmoe::{outer}", "(Tensor x, Tensor grad, Tensor offsets) -> Tensor")
    torch.library.impl(f"intbmoe::{mm}", "default", run_mm)
    torch.library.impl(f"intbmoe::{outer}", "default", run_outer)
    multiply, multiply_outer = getattr(torch.ops.intbmoe, mm), getattr(torch.ops.intbmoe, outer)

    @torch.library.register_fake(f"intbmoe::{mm}")
    def _(x, weight, offsets, complete):
        return empty_rows(x, x.shape[0], weight.shape[2])

    @torch.library.register_fake(f"intbmoe::{outer}")
    def _(x, grad, offsets):
        return empty_matrices(x, offsets.shape[0], x.shape[1], grad.shape[1])

    def save_mm(ctx, inputs, output):
        *tensors, ctx.complete = inputs
        ctx.save_for_backward(*tensors)

    def differentiate_mm(ctx, grad):
        x, weight, offsets = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_grad = multiply(grad, weight.transpose(1, 2), offsets, ctx.complete) if needs_x else None
        return x_grad, multiply_outer(x, grad, offsets) if needs_weight else None, None, None

    def save_outer(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def differentiate_outer(ctx, outer_grad):
        x, grad, offsets = ctx.saved_tensors
        x_grad = multiply(grad, outer_grad.transpose(1, 2), offsets, False)
        return x_grad, multiply(x, outer_grad, offsets, False), None

    torch.library.register_autograd(f"intbmoe::{mm}", differentiate_mm, setup_context=save_mm)
    torch.library.register_autograd(f"intbmoe::{outer}", differentiate_outer, setup_context=save_outer)

    @register_flop_formula(multiply)
    def _(x_shape, weight_shape, *_, **__):
        return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]

    @register_flop_formula(multiply_outer)
    def _(x_shape, grad_shape, *_, **__):
        return 2 * x_shape[0] * x_shape[1] * grad_shape[1]
