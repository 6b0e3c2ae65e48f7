"""A grouped product and its weight gradient as custom ops, around whatever computes the two.

Opaque to the compiler, counted by the flop counter, differentiable twice.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from intbmoe.ops import operation
from intbmoe.ops.triton_support import empty_matrices, empty_rows

Multiply = Callable[..., Tensor]


def define(mm: str, outer: str, run_mm: Multiply, run_outer: Multiply) -> tuple[Multiply, Multiply]:
    """Make ``run_mm(x, weight, offsets, complete)`` the op ``intbmoe::mm``, ``run_outer(x, grad, offsets)`` the other.

    Both must give rows that start at multiples of 16 bytes, as torch's grouped GEMM does. Returns what calls them.
    """

    def allocate(x, weight, offsets, complete):
        return empty_rows(x, x.shape[0], weight.shape[2])

    def allocate_outer(x, grad, offsets):
        return empty_matrices(x, offsets.shape[0], x.shape[1], grad.shape[1])

    def save(ctx, inputs, output):
        *tensors, ctx.complete = inputs
        ctx.save_for_backward(*tensors)

    def differentiate(ctx, grad):
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

    schema = "(Tensor x, Tensor weight, Tensor offsets, bool complete) -> Tensor"
    multiply = operation.define(mm, schema, run_mm, allocate, save, differentiate)
    schema = "(Tensor x, Tensor grad, Tensor offsets) -> Tensor"
    multiply_outer = operation.define(outer, schema, run_outer, allocate_outer, save_outer, differentiate_outer)

    @register_flop_formula(getattr(torch.ops.intbmoe, mm))
    def _(x_shape, weight_shape, *_, **__):
        return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]

    @register_flop_formula(getattr(torch.ops.intbmoe, outer))
    def _(x_shape, grad_shape, *_, **__):
        return 2 * x_shape[0] * x_shape[1] * grad_shape[1]

    return multiply, multiply_outer
