"""The specification: every group's matrix is built, then applied; all G of them exist at once."""

import torch
from torch import Tensor


def merged_mm(z: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """(G, S, i) inputs, (G, E) coefficients, (E, i, o) weights → (G, S, o), group g times Σ_e a_{g,e} W_e.

    Matrices are merged in the type of ``a`` and applied in the type of ``z``.
    """
    merged = torch.einsum("ge,eio->gio", a, weight.to(a.dtype))
    return torch.bmm(z, merged.to(z.dtype))
