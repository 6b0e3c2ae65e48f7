"""A SwiGLU network: two products, one through SiLU, multiplied, and a third."""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.swiglu import naive
from intbmoe.ops.triton_support import aligned
from intbmoe.precision import cast, linear


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, backend: Backend) -> Tensor:
    """As ``naive.swiglu``."""
    if backend != "fused":
        return naive.swiglu(x, gate, up, down)
    from intbmoe.ops.swiglu import fused

    # One product and one kernel: reading x twice costs more than joining the two matrices. Widths that are no multiple
    # of 16 bytes would make cuBLAS fall back to kernels three times as slow: zeros, which change nothing, fill them up.
    gate, up, down = (cast(weight, x.dtype) for weight in (gate, up, down))
    missing = aligned(gate.shape[0], x.dtype) - gate.shape[0]
    parts = [gate, up]
    if missing:
        zeros = gate.new_zeros(missing, gate.shape[1])
        parts, down = [gate, zeros, up, zeros], F.pad(down, (0, missing))
    inner = fused.swiglu(linear(x.reshape(-1, x.shape[-1]), torch.cat(parts)))
    return linear(inner, down).view(x.shape)
