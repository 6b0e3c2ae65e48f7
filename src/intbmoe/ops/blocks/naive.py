"""The readable forward of IntBMoE's blocks, and the specification of every backend.

``run_blocks`` loops over the blocks and runs each on the tokens that chose it; its steps are below it.
"""

import torch
from torch import Tensor

from intbmoe.ops.blocks import Blocks

LAYER_NORM_EPS = 1e-5
RMS_EPS = 1e-8


def run_blocks(x: Tensor, ids: Tensor, weights: Tensor, blocks: Blocks) -> Tensor:
    """(N, d) tokens, (N, k) chosen blocks (−1: none) and their weights → (N, d) weighted sums."""
    y = torch.zeros_like(x, dtype=weights.dtype)
    for b in range(blocks.weights[0].shape[0]):
        token, choice = (ids == b).nonzero(as_tuple=True)
        out = run_block(x[token], blocks, b)
        y = y.index_add(0, token, out * weights[token, choice].unsqueeze(-1))
    return y


def run_block(x: Tensor, blocks: Blocks, b: int) -> Tensor:
    """(n, d) tokens → (n, d) through block ``b``."""
    z = x
    if blocks.token_filter is not None:
        z = filter_tokens(x, x @ blocks.token_filter.T.to(x.dtype), blocks.block_filter[b])
    for layer, (weight, bias) in enumerate(zip(blocks.weights, blocks.biases, strict=True)):
        z = z.to(weight.dtype) @ weight[b] + bias[b]
        if blocks.scale is not None:
            v, g = z.chunk(2, dim=-1)
            gain = blocks.gains[layer] if blocks.gains else None
            z = dprg(v, g, gain, blocks.scale, blocks.gate_shifts[layer] if blocks.gate_shifts else None)
        if layer < len(blocks.norms):
            z = layer_norm(z, *blocks.norms[layer])
    return z


def layer_norm(z: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    z = z - z.mean(-1, keepdim=True)
    return z / torch.sqrt(z.square().mean(-1, keepdim=True) + LAYER_NORM_EPS) * gain + shift


def filter_tokens(x: Tensor, token_term: Tensor, block_term: Tensor) -> Tensor:
    """(n, d) tokens, (n, d) W_x x, (n, d) or (d,) W_c c + b → x ⊙ sigmoid(W_x x + W_c c + b)."""
    return x * torch.sigmoid(token_term + block_term)


def dprg(v: Tensor, g: Tensor, gain: Tensor | None, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    """Dual-Path Residual Gating, value and gate (…, o) → v ⊙ (1 + λ·SiLU(RMSNorm(g))).

    With a ``shift`` the norm is a LayerNorm; without a ``gain`` there is none.
    """
    if shift is not None:
        g = layer_norm(g, gain, shift)
    elif gain is not None:
        g = g / torch.sqrt(g.square().mean(-1, keepdim=True) + RMS_EPS) * gain
    silu = g * torch.sigmoid(g)
    return v * (1 + scale * silu)
