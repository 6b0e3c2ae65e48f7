"""The specification of block execution: a loop over blocks, each run on the tokens that chose it."""

import torch
from torch import Tensor

from intbmoe.ops.blocks import Blocks
from intbmoe.ops.dprg import naive as dprg_naive

LAYER_NORM_EPS = 1e-5


def run_block(x: Tensor, blocks: Blocks, b: int) -> Tensor:
    """(n, d) tokens → (n, d) through block ``b``."""
    z = x
    if blocks.token_filter is not None:
        z = x * torch.sigmoid(x @ blocks.token_filter.T.to(x.dtype) + blocks.block_filter[b])
    for layer, (weight, bias) in enumerate(zip(blocks.weights, blocks.biases, strict=True)):
        z = z.to(weight.dtype) @ weight[b] + bias[b]
        if blocks.scale is not None:
            v, g = z.chunk(2, dim=-1)
            z = dprg_naive.dprg(v, g, blocks.gains[layer], blocks.scale)
        if layer < len(blocks.norms):
            gain, shift = blocks.norms[layer]
            z = z - z.mean(-1, keepdim=True)
            z = z / torch.sqrt(z.square().mean(-1, keepdim=True) + LAYER_NORM_EPS) * gain + shift
    return z


def run_blocks(x: Tensor, ids: Tensor, weights: Tensor, blocks: Blocks) -> Tensor:
    """(N, d) tokens, (N, k) chosen blocks (−1: none) and their weights → (N, d) weighted sums."""
    y = torch.zeros_like(x, dtype=weights.dtype)
    for b in range(blocks.weights[0].shape[0]):
        token, choice = (ids == b).nonzero(as_tuple=True)
        out = run_block(x[token], blocks, b)
        y = y.index_add(0, token, out * weights[token, choice].unsqueeze(-1))
    return y
