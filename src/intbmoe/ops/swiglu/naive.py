"""The specification, in plain torch."""

import torch.nn.functional as F
from torch import Tensor

from intbmoe.precision import linear


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """(…, d) tokens, (h, d) weights → SiLU(gate x) ⊙ up x, (…, h)."""
    return F.silu(linear(x, gate)) * linear(x, up)
