"""From codes to coefficients: a linear map, LayerNorm, ReLU, and a linear map for each path."""

from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.hypernetwork import naive

MOST_CODES = 64  # that one program of the fused backward takes; plain operations are as good for more

Map = tuple[Tensor, Tensor]  # weight and bias


def coefficients(
    codes: Tensor, trunk: Map, norm: Map, eps: float, value: Map, gate: Map | None, backend: Backend
) -> tuple[Tensor, Tensor | None]:
    """As ``naive.coefficients``."""
    if backend != "fused" or codes.shape[0] > MOST_CODES:
        return naive.coefficients(codes, trunk, norm, eps, value, gate)
    from intbmoe.ops.hypernetwork import fused

    return fused.coefficients(codes, trunk, norm, eps, value, gate)
