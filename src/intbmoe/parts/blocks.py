"""How tokens run through composed blocks: one of five forms, all of the same outputs and gradients.

fused      Triton kernels throughout: on a GPU
native     one call of a compiled library: on the CPU without gradients, where it has been built
grouped    torch's grouped GEMM and plain operations: on the CPU
tiled      plain torch throughout: float64, export, other devices
naive      a loop over blocks: the specification
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops import native as native_library
from intbmoe.ops.blocks import Blocks, naive, native
from intbmoe.ops.composed_mm import multiply
from intbmoe.ops.dprg import dprg
from intbmoe.ops.grouped_mm import choose_form as choose_product
from intbmoe.ops.permute import permute
from intbmoe.ops.triton_support import usable
from intbmoe.parts.dispatch import combine, dispatch, spread, to_rows
from intbmoe.parts.router import count_choices
from intbmoe.precision import cast, linear, wide

FORMS = ("fused", "native", "grouped", "tiled", "naive")


def choose_form(x: Tensor) -> str:
    """The fastest form for inputs like ``x``: by device, type and gradients, and what is there to run it."""
    if usable(x):
        return "fused"
    return "native" if native_library.usable(x) else choose_product(x)


def run_blocks(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    blocks: Blocks,
    form: str,
    *,
    complete: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(N, d) tokens, (N, k) their blocks (−1: none) and weights → (N, d) weighted sums plus ``shared``, and loads (K,).

    ``complete`` says that no id is −1; ``dtype`` is a type that the caller casts to, which a form may spare it.
    """
    count = blocks.weights[0].shape[0]
    if form == "fused":
        from intbmoe.ops.blocks import fused

        plan = permute(ids, count)
        return fused.run_blocks(x, weights, shared, blocks, plan, dtype), plan.counts
    if form == "native":
        native_library.require_usable(x)
        return native.run_blocks(x, ids, weights, shared, blocks)
    if form == "naive":
        y, load = naive.run_blocks(x, ids, weights, blocks), count_choices(ids, count)
    else:
        plan = dispatch(ids, count, complete, plain=True)
        z = _run_rows(x, blocks, plan, form)
        y, load = combine(z, weights, plan), plan.counts
    return y if shared is None else y + shared, load


def _run_rows(x, blocks, plan, form):
    """(N, d) tokens → (M, d) their rows' outputs, sorted by block."""
    z = to_rows(x, plan)
    if blocks.token_filter is not None:
        token_term = to_rows(linear(x, blocks.token_filter), plan)
        z = z * token_term.add_(spread(blocks.block_filter, plan)).sigmoid_()
    for layer, (weight, bias) in enumerate(zip(blocks.weights, blocks.biases, strict=True)):
        z = multiply(cast(z, x.dtype), weight, plan.offsets, complete=plan.complete, form=form)
        z = wide(z).add_(spread(bias, plan))
        if blocks.scale is not None:
            z = dprg(z, blocks.gains[layer], blocks.scale)
        if layer < len(blocks.norms):
            z = F.layer_norm(z, z.shape[-1:], *blocks.norms[layer], naive.LAYER_NORM_EPS)
    return z
