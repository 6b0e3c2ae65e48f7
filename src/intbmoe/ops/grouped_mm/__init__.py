"""The matrix product of every sparse method: rows sorted by group, each group with its own matrix."""

from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.grouped_mm import fused, grouped, naive, tiled


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, backend: Backend, *, complete: bool = False) -> Tensor:
    """(M, i) rows sorted by group, (G, i, o) weights, (G,) end offsets → (M, o); zero after the last group.

    ``complete`` says that no row follows the last group.
    """
    match backend:
        case "fused":
            return fused.grouped_mm(x, weight, offsets, complete)
        case "grouped":
            return grouped.grouped_mm(x, weight, offsets, complete)
        case "tiled":
            return tiled.grouped_mm(x, weight, offsets)
        case "naive":
            return naive.grouped_mm(x, weight, offsets)
    raise ValueError(f"backend={backend!r}: must be one of fused, grouped, tiled, naive")


def grouped_outer(x: Tensor, grad: Tensor, offsets: Tensor, backend: Backend) -> Tensor:
    """(M, i) and (M, o) rows sorted by group → (G, i, o), the sum of x ⊗ grad over each group's rows."""
    return (fused if backend == "fused" else grouped).grouped_outer(x, grad, offsets)
