"""The specification, in plain torch."""

import torch
from torch import Tensor

from intbmoe.precision import cast, linear


def filter_terms(weight: Tensor, bias: Tensor, codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(d, d + c) weight [W_x | W_c], (d,) bias and (K, c) codes → (d, d) W_x in ``dtype``, (K, d) W_c c + b."""
    token, code = weight.split([weight.shape[0], codes.shape[1]], dim=1)
    return cast(token, dtype), linear(codes, code, bias)
