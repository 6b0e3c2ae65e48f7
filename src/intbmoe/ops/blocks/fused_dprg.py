"""The arithmetic of a gated row (DPRG) that several Triton kernels share; ``fused_gate.py`` has the letters."""

import triton
import triton.language as tl


@triton.jit
def inverse_rms(g, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean(g²) + ε) of each row; columns past the width must be zero."""
    return 1 / tl.sqrt(tl.sum(g * g, 1) / WIDTH + EPS)


@triton.jit
def gate_gradients(dz, v, n, gain, scale):
    """From dz̃: dv, dn before RMSNorm's own, and the addends of the gradients of gain and λ."""
    u = n * gain
    sigmoid = tl.sigmoid(u)
    silu = u * sigmoid
    dv = dz * (1 + scale * silu)
    du = dz * v * scale * sigmoid * (1 + u * (1 - sigmoid))
    return dv, du * gain, du * n, dz * v * silu


@triton.jit
def rms_gradient(dn, n, rms, WIDTH: tl.constexpr):
    """Through n = g / rms(g)."""
    return rms[:, None] * (dn - n * (tl.sum(dn * n, 1) / WIDTH)[:, None])
