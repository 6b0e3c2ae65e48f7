"""SiLU(gate) ⊙ up on rows [gate | up], one product's output."""

import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.triton_support import usable


def swiglu(rows: Tensor) -> Tensor:
    """(N, 2·h) rows [gate | up] → (N, h); on a GPU in one kernel."""
    if usable(rows):
        from intbmoe.ops.swiglu import fused

        return fused.swiglu(rows)
    gate, up = rows.chunk(2, -1)
    return F.silu(gate) * up
