"""The two parts of the filter's weight: the part for tokens, cast, and each block's term, the same for all tokens."""

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.filter_terms import naive
from intbmoe.ops.triton_support import power_of_2

MOST_CODE_NUMBERS = 4096  # numbers in all codes that a program can hold in registers


def filter_terms(
    weight: Tensor, bias: Tensor, codes: Tensor, dtype: torch.dtype, backend: Backend
) -> tuple[Tensor, Tensor]:
    """The same as ``naive.filter_terms``."""
    if backend != "fused" or power_of_2(codes.shape[0], 16) * power_of_2(codes.shape[1], 16) > MOST_CODE_NUMBERS:
        return naive.filter_terms(weight, bias, codes, dtype)
    from intbmoe.ops.filter_terms import fused

    return fused.filter_terms(weight, bias, codes, dtype)
