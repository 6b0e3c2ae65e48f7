"""A pool of expert bases, merged into blocks."""

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.compose import Coefficients, compose
from intbmoe.ops.composed_mm import Pooled
from intbmoe.parts.experts import StackedLinear
from intbmoe.precision import wide


class Pool(StackedLinear):
    """E bases of one internal layer. Calling it composes: its own forward reads its weights, where hooks, adapters and
    parametrisations expect it."""

    def forward(self, alpha: Coefficients, dtype: torch.dtype, backend: Backend, recompute: bool) -> Tensor | Pooled:
        """K blocks' weights (K, i, P·o) in ``dtype``.

        With ``recompute`` they are composed where they are used, in backward once more, if the backend can.
        """
        if recompute and torch.is_grad_enabled() and backend in ("fused", "grouped"):
            return Pooled(alpha, self.weight)
        return compose(alpha, self.weight, dtype, backend)

    def biases(self, alpha: Coefficients, backend: Backend) -> Tensor:
        """K blocks' biases (K, P·o) in the wide type."""
        if self.bias is None:
            paths = 1 if alpha.gate is None else 2
            return alpha.value.new_zeros(alpha.value.shape[0], paths * self.weight.shape[2])
        return compose(alpha, self.bias.unsqueeze(1), wide(self.bias).dtype, backend).squeeze(1).contiguous()
