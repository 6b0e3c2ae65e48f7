"""Turns codes into coefficients: a linear map, LayerNorm, ReLU, and a linear map for each path."""

from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.hypernetwork import naive

MOST_CODES, MOST_CODES_IF_NARROW = 64, 128  # that one program of the fused backward can take
NARROW = 16, 32  # at most this many hidden units, and this many entries in a code

Map = tuple[Tensor, Tensor]  # weight and bias


def coefficients(
    codes: Tensor, trunk: Map, norm: Map, eps: float, value: Map, gate: Map | None, backend: Backend
) -> tuple[Tensor, Tensor | None]:
    """As ``naive.coefficients``."""
    narrow = all(size <= most for size, most in zip(trunk[0].shape, NARROW, strict=True))
    most = MOST_CODES_IF_NARROW if narrow else MOST_CODES
    if backend != "fused" or codes.shape[0] > most:
        return naive.coefficients(codes, trunk, norm, eps, value, gate)
    from intbmoe.ops.hypernetwork import fused

    return fused.coefficients(codes, trunk, norm, eps, value, gate)
