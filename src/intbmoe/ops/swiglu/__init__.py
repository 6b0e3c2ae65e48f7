"""A SwiGLU network: two products, one of them through SiLU, multiplied, and a third product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.aligned_linear import filled_up, width_to_multiply
from intbmoe.ops.backend import Backend
from intbmoe.ops.swiglu import naive
from intbmoe.ops.triton_support import aligned


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, backend: Backend) -> Tensor:
    """The same as ``naive.swiglu``."""
    if backend != "fused":
        return naive.swiglu(x, gate, up, down)
    from intbmoe.ops.swiglu import fused_join, fused_product

    # One product and one kernel: reading x twice costs more than joining the two matrices.
    rows = x.reshape(-1, x.shape[-1])
    width = width_to_multiply(rows, 2 * gate.shape[0])
    if down.dtype == gate.dtype == x.dtype and gate.shape == (aligned(gate.shape[0], x.dtype), width):
        joined = torch.cat([gate, up])
    else:
        joined, down = fused_join.join(gate, up, down, width, x.dtype)
    inner = fused_product.swiglu_product(filled_up(rows, width), joined)
    return F.linear(inner, down)[:, : x.shape[-1]].view(x.shape)
