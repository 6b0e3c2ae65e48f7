"""A pool of expert bases from which blocks are composed."""

from collections.abc import Iterable

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.branches import COEFFICIENTS, Branches, pool
from intbmoe.ops.compose import Coefficients, compose, compose_biases, compose_both
from intbmoe.ops.composed_mm import Pooled
from intbmoe.parts.experts import StackedLinear


class Pool(StackedLinear):
    """E bases of one internal layer. Calling the pool composes blocks, so that its weights are read in its own forward,
    as hooks, adapters and parametrisations expect."""

    def forward(
        self, alpha: Coefficients, dtype: torch.dtype, backend: Backend, recompute: bool
    ) -> tuple[Tensor | Pooled, Tensor]:
        """Return K blocks' weights (K, i, P·o) in ``dtype``, and their biases (K, P·o) in the wide type.

        With ``recompute``, and if the backend can, weights are composed where they are used, and again in backward.
        """
        if recompute and torch.is_grad_enabled() and backend in ("fused", "grouped"):
            return Pooled(alpha, self.weight), self._biases(alpha, backend)
        if self.bias is None:
            return compose(alpha, self.weight, dtype, backend), self._biases(alpha, backend)
        return compose_both(alpha, self.weight, self.bias, dtype, backend)

    def _biases(self, alpha: Coefficients, backend: Backend) -> Tensor:
        if self.bias is None:
            paths = 1 if alpha.gate is None else 2
            return alpha.value.new_zeros(alpha.value.shape[0], paths * self.weight.shape[2])
        return compose_biases(alpha, self.bias, backend)


def compose_pools(
    pools: Iterable[Pool],
    alpha: Coefficients,
    dtype: torch.dtype,
    backend: Backend,
    recompute: bool,
    branches: Branches,
) -> tuple[tuple[Tensor | Pooled, ...], tuple[Tensor, ...]]:
    """Compose each pool on a branch of its own; return the weights and biases of all internal layers."""
    composed = []
    for number, bases in enumerate(pools):
        with branches.branch(pool(number), alpha.value, alpha.gate, after=COEFFICIENTS):
            composed.append(bases(alpha, dtype, backend, recompute))
    weights, biases = zip(*composed, strict=True)
    return weights, biases
