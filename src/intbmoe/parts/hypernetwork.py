"""From a block's code to the coefficients that compose it."""

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.ops.compose import Coefficients
from intbmoe.precision import linear, wide


class Hypernetwork(nn.Module):
    """From a block's code to its coefficients: one for each base and path.

    ``hidden`` is the inner width of the paper's two-layer form; None makes each path one linear map of the code.
    """

    def __init__(
        self, codes: int, hidden: int | None, experts: int, *, gate: bool, coefficients: Literal["linear", "softmax"]
    ) -> None:
        super().__init__()
        self.experts, self.coefficients = experts, coefficients
        if hidden is not None:
            self.trunk = nn.Linear(codes, hidden)
            self.norm = nn.LayerNorm(hidden)
        self.two_layer = hidden is not None
        self.value = nn.Linear(hidden or codes, experts)
        self.gate = nn.Linear(hidden or codes, experts) if gate else None

    def forward(self, codes: Tensor) -> Coefficients:
        """(K, codes) → the coefficients of each path in the wide type."""
        q = wide(codes)
        if self.two_layer:
            trunk = linear(q, self.trunk.weight, self.trunk.bias)
            norm = wide(self.norm.weight), wide(self.norm.bias)
            q = F.relu(F.layer_norm(trunk, self.norm.normalized_shape, *norm, self.norm.eps))
        value = linear(q, self.value.weight, self.value.bias)
        gate = None if self.gate is None else linear(q, self.gate.weight, self.gate.bias)
        if self.coefficients == "softmax":
            return Coefficients(value.softmax(-1), None if gate is None else gate.softmax(-1), 1.0)
        return Coefficients(value, gate, 1 / math.sqrt(self.experts))
