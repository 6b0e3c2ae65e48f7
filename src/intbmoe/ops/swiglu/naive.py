"""The specification, in plain torch."""

import torch.nn.functional as F
from torch import Tensor

from intbmoe.precision import linear


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(…, d) tokens, (h, d), (h, d) and (d, h) weights → down (SiLU(gate x) ⊙ up x), (…, d)."""
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)
