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

    def forward(
        self, alpha: Coefficients, dtype: torch.dtype, backend: Backend, recompute: bool = False
    ) -> tuple[Tensor | Pooled, Tensor]:
        """K blocks' weights (K, i, P·o) in ``dtype`` and biases (K, P·o) in the wide type.

        With ``recompute`` the weights are composed where they are used, in backward once more, if the backend can.
        """
        if recompute and torch.is_grad_enabled() and backend in ("fused", "grouped"):
            weights = Pooled(alpha, self.weight)
        else:
            weights = compose(alpha, self.weight, dtype, backend)
        if self.bias is None:
            return weights, alpha.value.new_zeros(weights.shape[0], weights.shape[2])
        biases = compose(alpha, self.bias.unsqueeze(1), wide(self.bias).dtype, backend)
        return weights, biases.squeeze(1).contiguous()
