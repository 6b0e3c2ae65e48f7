"""The hypernetwork: from a block's code to the coefficients that compose the block."""

import math
from typing import Literal

from torch import Tensor, nn

from intbmoe.ops.backend import Backend
from intbmoe.ops.compose import Coefficients
from intbmoe.ops.hypernetwork import coefficients
from intbmoe.parts.linear import Linear
from intbmoe.precision import linear, wide


class Hypernetwork(nn.Module):
    """Maps a block's code to its coefficients, one for each base and path.

    ``hidden`` is the inner width of the paper's two-layer form; with None each path is one linear map of the code.
    """

    def __init__(
        self, codes: int, hidden: int | None, experts: int, *, gate: bool, coefficients: Literal["linear", "softmax"]
    ) -> None:
        super().__init__()
        self.experts, self.coefficients = experts, coefficients
        if hidden is not None:
            self.trunk = Linear(codes, hidden)
            self.norm = nn.LayerNorm(hidden)
        self.two_layer = hidden is not None
        self.value = Linear(hidden or codes, experts)
        self.gate = Linear(hidden or codes, experts) if gate else None

    def forward(self, codes: Tensor, backend: Backend = "tiled") -> Coefficients:
        """(K, codes) → the coefficients of each path in the wide type."""
        q = wide(codes)
        maps = [None if each is None else (each.weight, each.bias) for each in (self.value, self.gate)]
        if self.two_layer:
            trunk, norm = ((each.weight, each.bias) for each in (self.trunk, self.norm))
            value, gate = coefficients(q, trunk, norm, self.norm.eps, *maps, backend)
        else:
            value, gate = (None if each is None else linear(q, *each) for each in maps)
        if self.coefficients == "softmax":
            return Coefficients(value.softmax(-1), None if gate is None else gate.softmax(-1), 1.0)
        return Coefficients(value, gate, 1 / math.sqrt(self.experts))
