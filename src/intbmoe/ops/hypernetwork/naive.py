"""The specification, in plain torch."""

import torch.nn.functional as F
from torch import Tensor

from intbmoe.precision import cast, linear


def coefficients(codes: Tensor, trunk, norm, eps: float, value, gate) -> tuple[Tensor, Tensor | None]:
    """(K, c) codes, maps to h and from h to E, each a weight and a bias → (K, E) for each path; None without a gate."""
    hidden = linear(codes, *trunk)
    gain, shift = (cast(parameter, codes.dtype) for parameter in norm)
    q = F.relu(F.layer_norm(hidden, hidden.shape[-1:], gain, shift, eps))
    return linear(q, *value), None if gate is None else linear(q, *gate)
