"""Defines a grouped product and its weight gradient as custom ops, given two functions that compute them.

The ops are opaque to the compiler, counted by the FLOP counter, and differentiable twice.
"""

from collections.abc import Callable

from torch import Tensor

from intbmoe.ops import operation
from intbmoe.ops.branches import aside
from intbmoe.ops.operation import schema_of
from intbmoe.ops.triton_support import empty_matrices, empty_rows

Multiply = Callable[..., Tensor]


def define(mm: str, outer: str, run_mm: Multiply, run_outer: Multiply) -> tuple[Multiply, Multiply]:
    """Define the ops named ``mm`` and ``outer``, and return two functions that call them.

    They run ``run_mm(x, weight, offsets, complete)`` and ``run_outer(x, grad, offsets)``, which must return rows that
    start at multiples of 16 bytes, as torch's grouped GEMM does.
    """

    def allocate(x, weight, offsets, complete: bool):
        return empty_rows(x, x.shape[0], weight.shape[2])

    def allocate_outer(x, grad, offsets):
        return empty_matrices(x, offsets.shape[0], x.shape[1], grad.shape[1])

    def save(ctx, inputs, output):
        *tensors, ctx.complete = inputs
        ctx.save_for_backward(*tensors)

    def differentiate(ctx, grad):
        x, weight, offsets = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_grad = weight_grad = None
        if needs_weight:
            with aside(ctx, x, grad, offsets):
                weight_grad = multiply_outer(x, grad, offsets)
        if needs_x:
            x_grad = multiply(grad, weight.transpose(1, 2), offsets, ctx.complete)
        return x_grad, weight_grad, None, None

    def differentiate_outer(ctx, outer_grad):
        x, grad, offsets = ctx.saved_tensors
        x_grad = multiply(grad, outer_grad.transpose(1, 2), offsets, False)
        return x_grad, multiply(x, outer_grad, offsets, False), None

    def flops(x_shape, weight_shape, *_, **__):
        return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]

    def flops_outer(x_shape, grad_shape, *_, **__):
        return 2 * x_shape[0] * x_shape[1] * grad_shape[1]

    multiply = operation.define(mm, schema_of(allocate), run_mm, allocate, save, differentiate, flops)
    multiply_outer = operation.define(
        outer, schema_of(allocate_outer), run_outer, allocate_outer, None, differentiate_outer, flops_outer
    )
    return multiply, multiply_outer
