"""Dual-Path Residual Gating on rows of [v | g]."""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.dprg import naive
from intbmoe.ops.eager import transformed

__all__ = ["dprg", "naive"]


def dprg(vg: Tensor, gain: Tensor, scale: Tensor) -> Tensor:
    """(M, 2·o) rows [v | g] → (M, o)."""
    v, g = vg.chunk(2, dim=-1)
    if torch.is_grad_enabled() or transformed():
        return torch.addcmul(v, v, scale * F.silu(F.rms_norm(g, gain.shape, gain, naive.RMS_EPS)))
    # Without gradients nothing need be kept: one buffer is written over and over.
    size = g.square().mean(-1, keepdim=True).add_(naive.RMS_EPS).rsqrt_()
    gate = F.silu((g * gain).mul_(size), inplace=True).mul_(scale)
    return torch.addcmul(v, v, gate, out=gate)
