"""Turns codes into coefficients: a linear map, LayerNorm, ReLU, and a linear map for each path."""

from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.hypernetwork import naive
from intbmoe.ops.triton_support import power_of_2

MOST_CODES, MOST_CODES_IF_NARROW = 64, 128  # that one program of the fused backward can take
NARROW = 16, 32  # at most this many hidden units, and this many entries in a code
MOST_UNITS = 64  # hidden units; more would not fit into registers
MOST_NUMBERS = 2**17  # codes times hidden units times entries of a code: more need more than 98 KiB of shared memory

Map = tuple[Tensor, Tensor]  # weight and bias


def coefficients(
    codes: Tensor, trunk: Map, norm: Map, eps: float, value: Map, gate: Map | None, backend: Backend
) -> tuple[Tensor, Tensor | None]:
    """As ``naive.coefficients``."""
    if backend != "fused" or not _fits(codes.shape[0], *trunk[0].shape):
        return naive.coefficients(codes, trunk, norm, eps, value, gate)
    from intbmoe.ops.hypernetwork import fused

    return fused.coefficients(codes, trunk, norm, eps, value, gate)


def _fits(codes: int, units: int, width: int) -> bool:
    """Whether one program can hold this many codes of this width, and as many hidden units, even on a small GPU."""
    narrow = units <= NARROW[0] and width <= NARROW[1]
    numbers = power_of_2(codes, 16) * power_of_2(units, 16) * power_of_2(width, 16)
    most = MOST_CODES_IF_NARROW if narrow else MOST_CODES
    return codes <= most and units <= MOST_UNITS and numbers <= MOST_NUMBERS
