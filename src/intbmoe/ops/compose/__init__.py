"""Merges a pool of expert bases into blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.compose import naive, native, plain
from intbmoe.ops.eager import recorded
from intbmoe.precision import cast, wide


class Coefficients(NamedTuple):
    """How much of each base goes into each block."""

    value: Tensor  # (K, E), the value path's coefficients
    gate: Tensor | None  # (K, E), the gate path's; None without a gate
    factor: float  # what both are multiplied by

    @property
    def paths(self) -> list[Tensor]:
        """The coefficients of each path, as they multiply the bases."""
        return [path * self.factor for path in (self.value, self.gate) if path is not None]


def compose(coefficients: Coefficients, pool: Tensor, dtype: torch.dtype, backend: Backend) -> Tensor:
    """A pool (E, i, o) → composed (K, i, P·o) in ``dtype``, paths side by side; merged in the wide type."""
    if backend == "fused":
        from intbmoe.ops.compose import fused

        return fused.compose(coefficients.value, coefficients.gate, pool, None, coefficients.factor, dtype)[0]
    paths, bases = torch.stack(coefficients.paths), wide(pool)
    if backend == "naive":
        composed = naive.compose(paths, bases)
    else:
        composed = (native if _compiled(backend, paths, bases) else plain).product(paths, bases)
    return cast(composed, dtype)


def compose_gradients(
    grad: Tensor, coefficients: Coefficients, pool: Tensor, backend: Backend
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of value, gate and pool, given that of a composed pool (K, i, P·o)."""
    if backend == "fused":
        from intbmoe.ops.compose import fused

        value, gate, factor = coefficients
        rows, pool_grad, _ = fused.compose_gradient(grad, None, value, gate, pool, None, factor)
        rows = rows.view(-1, *value.shape)
    else:
        paths, bases = torch.stack(coefficients.paths), wide(pool)
        way = native if _compiled(backend, paths, bases) and not recorded() else plain
        rows, pool_grad = way.gradients(wide(grad), paths, bases)
        rows = rows * coefficients.factor
    return rows[0], None if coefficients.gate is None else rows[1], cast(pool_grad, pool.dtype)


def _compiled(backend: Backend, paths: Tensor, bases: Tensor) -> bool:
    """Whether the compiled library composes; it does so in training too, where its other operations do not run."""
    return backend in ("native", "grouped") and native.suits(paths, bases)


def compose_both(
    coefficients: Coefficients, pool: Tensor, biases: Tensor, dtype: torch.dtype, backend: Backend
) -> tuple[Tensor, Tensor]:
    """As ``compose``, and also the pool's biases (E, o) → (K, P·o) in the wide type; one kernel does both."""
    if backend == "fused":
        from intbmoe.ops.compose import fused

        return fused.compose(coefficients.value, coefficients.gate, pool, biases, coefficients.factor, dtype)
    return compose(coefficients, pool, dtype, backend), compose_biases(coefficients, biases, backend)


def compose_biases(coefficients: Coefficients, biases: Tensor, backend: Backend) -> Tensor:
    """Compose only a pool's biases (E, o) → (K, P·o)."""
    return compose(coefficients, biases.unsqueeze(1), wide(biases).dtype, backend).squeeze(1).contiguous()
