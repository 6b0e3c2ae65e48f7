"""The arithmetic of a gated row (DPRG) that several Triton kernels share; ``fused_gate.py`` explains the letters."""

import triton
import triton.language as tl

from intbmoe.ops.tiles import sigmoid


@triton.jit
def inverse_rms(g, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean(g²) + ε) of each row; columns past the width must be zero."""
    return 1 / tl.sqrt(tl.sum(g * g, 1) / WIDTH + EPS)


@triton.jit
def gate_factors(v, n, gain, scale):
    """Return the derivatives of z̃ = v ⊙ (1 + λ SiLU(u)), u = n ⊙ gain, with respect to v, u and λ."""
    u = n * gain
    opened = sigmoid(u)
    silu = u * opened
    scaled = scale * silu
    return 1 + scaled, v * (scale * opened + scaled - scaled * opened), v * silu


@triton.jit
def rms_gradient(dn, n, rms, WIDTH: tl.constexpr):
    """Return the gradient through n = g / rms(g)."""
    return rms[:, None] * (dn - n * (tl.sum(dn * n, 1) / WIDTH)[:, None])
