"""Expert networks."""

import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.parts.precision import linear


class SwiGLU(nn.Module):
    """``down(SiLU(gate x) ⊙ up x)``, three matrices without biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d), in the type of ``x``."""
        inner = F.silu(linear(x, self.gate.weight)) * linear(x, self.up.weight)
        return linear(inner, self.down.weight)
