"""A SwiGLU network: two products, one of them through SiLU, multiplied, and a third product."""

from torch import Tensor

from intbmoe.ops.aligned_linear import filled_up, width_to_multiply
from intbmoe.ops.backend import Backend
from intbmoe.ops.swiglu import naive


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, backend: Backend) -> Tensor:
    """The same as ``naive.swiglu``."""
    if backend != "fused":
        return naive.swiglu(x, gate, up, down)
    from intbmoe.ops.swiglu.fused import swiglu_network

    rows = x.reshape(-1, x.shape[-1])
    width = width_to_multiply(rows, 2 * gate.shape[0])
    return swiglu_network(filled_up(rows, width), gate, up, down)[:, : x.shape[-1]].view(x.shape)
