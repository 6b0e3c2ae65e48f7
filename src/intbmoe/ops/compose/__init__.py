"""Merges a pool of expert bases into blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.compose import naive
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
    merge = naive.compose if backend == "naive" else product
    return cast(merge(coefficients.paths, wide(pool)), dtype)


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


def product(coefficients: list[Tensor], pool: Tensor) -> Tensor:
    """As ``naive.compose``, reading the pool once: all paths of all blocks are the rows of one matrix product."""
    paths, blocks, bases = len(coefficients), coefficients[0].shape[0], pool.shape[0]
    merged = torch.cat(coefficients) @ pool.reshape(bases, -1)
    merged = merged.view(paths, blocks, *pool.shape[1:])
    return merged.movedim(0, -2).reshape(blocks, *pool.shape[1:-1], paths * pool.shape[-1])
