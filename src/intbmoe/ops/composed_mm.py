"""Composition and grouped product in one operation that saves the pool for backward, not the composed weights.

Autograd would save K composed matrices per pool: at MiniPile's size, 280 MB of float32 per layer. The pool is kept
anyway, so backward composes again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.compose import Coefficients, compose, compose_gradients
from intbmoe.ops.grouped_mm import grouped_mm, grouped_outer
from intbmoe.ops.operation import define, schema_of


@dataclass(frozen=True)
class Pooled:
    """Weights that are composed where they are used, instead of once in advance."""

    coefficients: Coefficients
    pool: Tensor  # (E, i, o)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape after composition: (K, i, P·o)."""
        paths = 1 if self.coefficients.gate is None else 2
        return self.coefficients.value.shape[0], self.pool.shape[1], paths * self.pool.shape[2]


def multiply(z: Tensor, weight: Tensor | Pooled, ends: Tensor, backend: Backend, *, complete: bool) -> Tensor:
    """(M, i) rows sorted by group, times their group's weight → (M, P·o)."""
    if isinstance(weight, Tensor):
        return grouped_mm(z, weight, ends, backend, complete=complete)
    value, gate, factor = weight.coefficients
    return _composed_mm(z, value, gate, weight.pool, ends, factor, complete, backend)


def _run(z, value, gate, pool, ends, factor, complete, backend):
    weight = compose(Coefficients(value, gate, factor), pool, z.dtype, backend)
    return grouped_mm(z, weight, ends, backend, complete=complete)


def _fake(z, value, gate, pool, ends, factor: float, complete: bool, backend: str):
    weight = Pooled(Coefficients(value, gate, factor), pool)
    return grouped_mm(z, z.new_empty(weight.shape), ends, backend, complete=complete)


def _run_backward(grad, z, value, gate, pool, ends, factor, complete, backend):
    weight = compose(Coefficients(value, gate, factor), pool, z.dtype, backend)
    z_grad = grouped_mm(grad, weight.transpose(1, 2), ends, backend, complete=complete)
    del weight
    weight_grad = grouped_outer(z, grad, ends, backend)
    value_grad, gate_grad, pool_grad = compose_gradients(weight_grad, Coefficients(value, gate, factor), pool, backend)
    gate_grad = value.new_empty(0, value.shape[1]) if gate is None else gate_grad.clone()  # outputs share no memory
    return z_grad, value_grad.clone(), gate_grad, pool_grad


def _fake_backward(grad, z, value, gate, pool, ends, factor: float, complete: bool, backend: str):
    weight = z.new_empty(Pooled(Coefficients(value, gate, factor), pool).shape).transpose(1, 2)
    z_grad = grouped_mm(grad, weight, ends, backend, complete=complete)
    gate_grad = value.new_empty(0 if gate is None else value.shape[0], value.shape[1])
    pool_grad = torch.empty_like(pool, memory_format=torch.contiguous_format)
    return z_grad, torch.empty_like(value), gate_grad, pool_grad


def _save(ctx, inputs, output):
    z, value, gate, pool, ends, ctx.factor, ctx.complete, ctx.backend = inputs
    ctx.save_for_backward(z, value, gate, pool, ends)


def _differentiate(ctx, grad):
    z, value, gate, pool, ends = ctx.saved_tensors
    z_grad, value_grad, gate_grad, pool_grad = _composed_gradient(
        grad, z, value, gate, pool, ends, ctx.factor, ctx.complete, ctx.backend
    )
    return z_grad, value_grad, None if gate is None else gate_grad, pool_grad, None, None, None, None


def _products(z_shape, value_shape, gate_shape, pool_shape) -> tuple[int, int]:
    """Return the FLOPs of one composition and of one grouped product."""
    paths = value_shape[0] * (1 if gate_shape is None else 2)
    matrix = pool_shape[1] * pool_shape[2]
    return 2 * paths * pool_shape[0] * matrix, 2 * z_shape[0] * matrix * paths // value_shape[0]


def _flops(*shapes, **_):
    return sum(_products(*shapes[:4]))


def _backward_flops(grad_shape, *shapes, **_):
    composition, product = _products(*shapes[:4])
    return 3 * composition + 2 * product


_composed_mm = define("composed_mm", schema_of(_fake), _run, _fake, _save, _differentiate, _flops)
_composed_gradient = define(
    "composed_mm_backward", schema_of(_fake_backward, 4), _run_backward, _fake_backward, flops=_backward_flops
)
