"""The specification of Dual-Path Residual Gating, one operation a line."""

import torch
from torch import Tensor

RMS_EPS = 1e-8


def dprg(v: Tensor, g: Tensor, gain: Tensor, scale: Tensor) -> Tensor:
    """Value and gate (…, o) → v ⊙ (1 + λ·SiLU(RMSNorm(g)))."""
    g = g / torch.sqrt(g.square().mean(-1, keepdim=True) + RMS_EPS) * gain
    silu = g * torch.sigmoid(g)
    return v * (1 + scale * silu)
