"""Run tokens through composed blocks, on each of the backends (``ops/backend.py``); all compute the same result.

fused, native and the specification, ``naive.py``, are in ``ops/blocks/``. grouped and tiled are here, and so is fused
for forms of a block without a Triton kernel: then only matrix products and dispatch use kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.blocks import Blocks, naive, native
from intbmoe.ops.branches import ROUTER, Branches
from intbmoe.ops.composed_mm import multiply
from intbmoe.ops.eager import transformed
from intbmoe.ops.permute import Permutation, permute
from intbmoe.parts.dispatch import combine, dispatch, spread, to_rows
from intbmoe.parts.router import count_choices
from intbmoe.precision import cast, linear, wide


def run_blocks(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    blocks: Blocks,
    backend: Backend,
    *,
    complete: bool,
    dtype: torch.dtype,
    branches: Branches,
) -> tuple[Tensor, Tensor]:
    """(N, d) tokens, (N, k) their blocks (−1: none) and weights → (N, d) weighted sums plus ``shared``, and loads (K,).

    ``complete`` says that no id is −1. ``dtype`` is the type that the caller will cast to; a backend may cast already.
    ``branches`` are those that computed everything else given here.
    """
    count = blocks.weights[0].shape[0]
    if backend == "fused" and blocks.has_kernels:
        from intbmoe.ops.blocks import fused

        branches.mark()  # the filter's term of the tokens starts here, beside the sort
        branches.join(ROUTER, ids, weights)
        plan = permute(ids, count, backend, complete)
        return fused.run_blocks(x, weights, shared, blocks, plan, dtype, branches), plan.counts
    made = *blocks.weights, *blocks.biases, blocks.token_filter, blocks.block_filter
    branches.join_all(ids, weights, shared, *made)
    if backend == "native":
        return native.run_blocks(x, ids, weights, shared, blocks)
    if backend == "naive":
        y, load = naive.run_blocks(x, ids, weights, blocks), count_choices(ids, count)
    else:
        plan = dispatch(ids, count, backend, complete)
        y, load = combine(_run_rows(x, blocks, plan), weights, plan), plan.counts
    return y if shared is None else y + shared, load


def _run_rows(x: Tensor, blocks: Blocks, plan: Permutation) -> Tensor:
    """(N, d) tokens → (M, d) outputs of their rows, sorted by block."""
    z = to_rows(x, plan)
    if blocks.token_filter is not None:
        token_term = to_rows(linear(x, blocks.token_filter), plan)
        z = z * _plus(token_term, spread(blocks.block_filter, plan)).sigmoid_()
    for layer, (weight, bias) in enumerate(zip(blocks.weights, blocks.biases, strict=True)):
        z = multiply(cast(z, x.dtype), weight, plan.ends, plan.backend, complete=plan.complete)
        z = _plus(wide(z), spread(bias, plan))
        if blocks.scale is not None:
            gain = blocks.gains[layer] if blocks.gains else None
            z = dprg(z, gain, blocks.scale, blocks.gate_shifts[layer] if blocks.gate_shifts else None)
        if layer < len(blocks.norms):
            z = F.layer_norm(z, z.shape[-1:], *blocks.norms[layer], naive.LAYER_NORM_EPS)
    return z


def _plus(a: Tensor, b: Tensor) -> Tensor:
    """a + b in the memory of ``a``, except under torch.func, which may give only ``b`` a further dimension."""
    return a + b if transformed() else a.add_(b)


def dprg(vg: Tensor, gain: Tensor | None, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    """Like ``naive.dprg``, on (M, 2·o) rows [v | g] → (M, o)."""
    v, g = vg.chunk(2, dim=-1)
    if shift is not None:
        return torch.addcmul(v, v, scale * F.silu(F.layer_norm(g, gain.shape, gain, shift, naive.LAYER_NORM_EPS)))
    if gain is None:
        return torch.addcmul(v, v, scale * F.silu(g))
    if torch.is_grad_enabled() or transformed():
        return torch.addcmul(v, v, scale * F.silu(F.rms_norm(g, gain.shape, gain, naive.RMS_EPS)))
    # Without gradients nothing must be kept, so one buffer is reused.
    size = g.square().mean(-1, keepdim=True).add_(naive.RMS_EPS).rsqrt_()
    gate = F.silu((g * gain).mul_(size), inplace=True).mul_(scale)
    return torch.addcmul(v, v, gate, out=gate)
