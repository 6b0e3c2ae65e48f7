"""Rows sorted by group, each group with its own matrix: the matrix product of every sparse method."""

import torch
from torch import Tensor

from intbmoe.checks import require
from intbmoe.ops.eager import exporting, has_dual_numbers, transformed
from intbmoe.ops.grouped_mm import fused, grouped, naive, tiled
from intbmoe.ops.triton_support import runs_on

FORMS = ("fused", "grouped", "tiled", "naive")


def choose_form(x: Tensor) -> str:
    """The form that runs ``x`` fastest without a data-dependent shape or a wait for the device.

    On CUDA that is the Triton kernel. Without Triton, torch's grouped GEMM is one kernel only in bfloat16 from compute
    capability 9.0 on; elsewhere it copies the offsets to the host and loops, so the tiles are used.
    """
    if exporting() or transformed() or x.dtype not in grouped.DTYPES:
        return "tiled"
    if x.device.type == "cuda":
        if runs_on(x.device):
            return "fused"
        one_kernel = x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)
        return "grouped" if one_kernel else "tiled"
    return "grouped" if x.device.type == "cpu" else "tiled"


def grouped_mm(
    x: Tensor, weight: Tensor, offsets: Tensor, *, complete: bool = False, form: str | None = None
) -> Tensor:
    """(M, i) rows sorted by group, (G, i, o) weights, (G,) end offsets → (M, o); zero after the last group."""
    form = form or choose_form(x)
    require(form in FORMS, "form", form, f"one of {', '.join(FORMS)}")
    if form in ("fused", "grouped") and has_dual_numbers():  # torch would drop their tangents without a word
        raise RuntimeError(f"form {form!r} has no forward-mode derivative: leave layer.form None, or take 'tiled'")
    if form == "fused":
        return fused.gathered_mm(x, weight, offsets, complete=complete)
    if form == "grouped":
        return grouped.grouped_mm(x, weight, offsets, complete)
    return (tiled if form == "tiled" else naive).grouped_mm(x, weight, offsets)
