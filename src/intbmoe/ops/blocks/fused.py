"""Blocks by Triton kernels around the grouped products: every tensor of rows is written once and read once.

    x ──filter──▶ z⁰ ──grouped GEMM──▶ [v|g] ──gate, LayerNorm──▶ z¹ ──grouped GEMM──▶ [v|g] ──gate, combine──▶ y

``naive.py`` is the specification. Rows after the last group (masked tokens) are neither computed nor read.
"""

import torch
from torch import Tensor

from intbmoe.ops.aligned_linear import square_linear
from intbmoe.ops.blocks import Blocks
from intbmoe.ops.blocks.fused_combine import gated_combine
from intbmoe.ops.blocks.fused_filter import filter_rows
from intbmoe.ops.blocks.fused_gate import gated_rows
from intbmoe.ops.blocks.naive import LAYER_NORM_EPS
from intbmoe.ops.branches import FILTER, SCALE, SHARED, TOKEN_TERM, Branches, pool, sums
from intbmoe.ops.composed_mm import multiply
from intbmoe.ops.permute import Permutation


def run_blocks(
    x: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    blocks: Blocks,
    plan: Permutation,
    dtype: torch.dtype,
    branches: Branches,
) -> Tensor:
    """(N, d) tokens, (N, k) weights of their choices, (N, d) the shared expert's output → (N, d) sums in ``dtype``.

    ``branches`` made ``shared`` and the blocks' tensors.
    """
    token_term = None
    if blocks.token_filter is not None:
        with branches.branch(TOKEN_TERM, x, blocks.token_filter, after=FILTER), branches.gradients(FILTER):
            token_term = square_linear(x, blocks.token_filter)
        branches.join(TOKEN_TERM, token_term)
    branches.join(FILTER, blocks.block_filter)
    with branches.gradients(FILTER):
        z = filter_rows(x, token_term, blocks.block_filter, plan)
    (scale,) = branches.take(SCALE, blocks.scale)
    gains = blocks.gains or (None,) * len(blocks.weights)
    norms = *blocks.norms, ()
    for layer, (weight, bias) in enumerate(zip(blocks.weights, blocks.biases, strict=True)):
        branches.join(pool(layer), weight, bias)
        with branches.gradients(pool(layer)):
            rows = multiply(z, weight, plan.ends, "fused", complete=True)
        bias, gain, factor, *norm = branches.take(sums(layer), bias, gains[layer], scale, *norms[layer])
        with branches.gradients(sums(layer)):
            if norm:
                z = gated_rows(rows, bias, gain, factor, norm, plan.ends, LAYER_NORM_EPS)
            else:
                branches.join(SHARED, shared)
                y = gated_combine(rows, bias, gain, factor, weights, shared, plan, dtype)
    return y
