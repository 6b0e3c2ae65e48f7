"""A pool of expert bases, merged into blocks."""

from typing import Literal

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

    def forward(
        self,
        alpha: Coefficients,
        of: Literal["weights", "biases"],
        dtype: torch.dtype,
        backend: Backend,
        recompute: bool,
    ) -> Tensor | Pooled:
        """K blocks' weights (K, i, P·o) in ``dtype``, or their biases (K, P·o) in the wide type.

        With ``recompute`` weights are composed where they are used, in backward once more, if the backend can.
        """
        if of == "biases":
            return self._biases(alpha, backend)
        if recompute and torch.is_grad_enabled() and backend in ("fused", "grouped"):
            return Pooled(alpha, self.weight)
        return compose(alpha, self.weight, dtype, backend)

    def _biases(self, alpha: Coefficients, backend: Backend) -> Tensor:
        if self.bias is None:
            paths = 1 if alpha.gate is None else 2
            return alpha.value.new_zeros(alpha.value.shape[0], paths * self.weight.shape[2])
        return compose(alpha, self.bias.unsqueeze(1), wide(self.bias).dtype, backend).squeeze(1).contiguous()
