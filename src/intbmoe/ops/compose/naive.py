"""The specification: one path of one internal layer at a time, as in the paper's equation."""

from collections.abc import Sequence

import torch
from torch import Tensor


def compose(coefficients: Sequence[Tensor], pool: Tensor) -> Tensor:
    """Coefficients (K, E) of each path and a pool (E, …, o) → composed (K, …, P·o), paths side by side."""
    return torch.cat([torch.einsum("ke,e...->k...", alpha, pool) for alpha in coefficients], dim=-1)
