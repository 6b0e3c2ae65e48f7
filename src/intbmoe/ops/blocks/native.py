"""Blocks without gradients on the CPU, from tokens to weighted sums in one call of the compiled library."""

from torch import Tensor

from intbmoe.ops.blocks import Blocks
from intbmoe.ops.native import problem
from intbmoe.precision import linear


def run_blocks(x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """(N, d) tokens, (N, k) their blocks (−1: none) and weights → (N, d) sums plus ``shared``, and loads (K,)."""
    paths = 1 if blocks.scale is None else 2
    widths = [x.shape[1], *[weight.shape[2] // paths for weight in blocks.weights]]
    lists = {
        "weights": blocks.weights,
        "scales": blocks.scales,
        "biases": blocks.biases,
        "gains": blocks.gains,
        "norm_gains": [gain for gain, _ in blocks.norms],
        "norm_shifts": [shift for _, shift in blocks.norms],
    }
    single = {"shared": shared, "scale": blocks.scale}
    if blocks.token_filter is not None:
        single |= {"token_term": linear(x, blocks.token_filter), "block_term": blocks.block_filter}
    return problem.run("block", widths, x, ids, weights, lists, single)
