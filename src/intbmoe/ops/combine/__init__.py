"""From rows back to tokens: ``naive.combine`` and ``fused.combine`` compute the weighted sum of each token's rows.

This module has the sum without weights, the gradient of a gather of tokens into rows. The backend ``fused`` runs it as
one kernel. In code compiled for a GPU it is always a separate operation: Inductor would fuse its gather into the
backward pass of the norm before the layer, as two loops of which the second reads what other threads stored in the
first, without a barrier (pytorch/pytorch#190519): in bfloat16, with a class token, gradients were off by a factor of
1000.
"""

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend
from intbmoe.ops.eager import compiled_for_gpu
from intbmoe.ops.operation import define, schema_of


def sum_rows(rows: Tensor, token: Tensor, inverse: Tensor, backend: Backend, ends: Tensor | None = None) -> Tensor:
    """(M, c) rows, (M,) their tokens, (N, k) the row of each choice (M: none) → (N, c), in the type of ``rows``.

    With the groups' ``ends``, which only ``fused`` accepts, rows after the last group are not read.
    """
    run = _sum_rows if backend == "fused" or compiled_for_gpu(rows) else _run
    return run(rows, token, inverse, backend, ends)


def rows_of_tokens(rows: Tensor, inverse: Tensor, trimmed: bool) -> Tensor:
    """(M, c) rows → (N, k, c), each token's in the order of its choices; if ``trimmed``, zero for choices of no row."""
    if trimmed:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return rows.index_select(0, inverse.reshape(-1)).view(*inverse.shape, rows.shape[1])


def _run(rows, token, inverse, backend, ends):
    if backend == "fused":
        from intbmoe.ops.combine import fused

        return fused.run_sum(rows, inverse, ends)
    return rows_of_tokens(rows, inverse, rows.shape[0] != inverse.numel()).sum(1)


def _allocate(rows, token, inverse, backend: str, ends):
    return rows.new_empty(inverse.shape[0], rows.shape[1])


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _differentiate(ctx, grad):
    return grad.index_select(0, ctx.saved_tensors[0]), None, None, None, None


_sum_rows = define("sum_rows", schema_of(_allocate), _run, _allocate, _save, _differentiate)
