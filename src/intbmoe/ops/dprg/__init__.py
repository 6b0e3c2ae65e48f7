"""Dual-Path Residual Gating on rows of [v | g]."""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.dprg import naive

__all__ = ["dprg", "naive"]


def dprg(vg: Tensor, gain: Tensor, scale: Tensor) -> Tensor:
    """(M, 2·o) rows [v | g] → (M, o), by torch's fused norm."""
    v, g = vg.chunk(2, dim=-1)
    g = F.rms_norm(g, gain.shape, gain, naive.RMS_EPS)
    return torch.addcmul(v, v, scale * F.silu(g))
