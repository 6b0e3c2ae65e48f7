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
from intbmoe.ops.branches import Branches
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

    ``branches`` made ``shared`` and the blocks' weights and biases, which the filter does not read.
    """
    token_term = None if blocks.token_filter is None else square_linear(x, blocks.token_filter)
    z = filter_rows(x, token_term, blocks.block_filter, plan)
    branches.join(shared, *blocks.weights, *blocks.biases)
    last = len(blocks.norms)
    gains = blocks.gains or (None,) * (last + 1)
    for layer, norm in enumerate(blocks.norms):
        rows = multiply(z, blocks.weights[layer], plan.ends, "fused", complete=True)
        z = gated_rows(rows, blocks.biases[layer], gains[layer], blocks.scale, norm, plan.ends, LAYER_NORM_EPS)
    rows = multiply(z, blocks.weights[last], plan.ends, "fused", complete=True)
    return gated_combine(rows, blocks.biases[last], gains[last], blocks.scale, weights, shared, plan, dtype)
