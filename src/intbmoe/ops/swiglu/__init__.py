"""The inner half of a SwiGLU network: two products, one through SiLU, multiplied."""

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.swiglu import naive
from intbmoe.precision import linear


def swiglu(x: Tensor, gate: Tensor, up: Tensor, backend: Backend) -> Tensor:
    """As ``naive.swiglu``."""
    if backend == "fused":
        from intbmoe.ops.swiglu import fused

        # One product and one kernel: reading x twice costs more than joining the two matrices.
        rows = linear(x.reshape(-1, x.shape[-1]), torch.cat([gate, up]))
        return fused.swiglu(rows).view(*x.shape[:-1], gate.shape[0])
    return naive.swiglu(x, gate, up)
