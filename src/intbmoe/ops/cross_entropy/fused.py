"""The cross-entropy in one Triton kernel each way: scores are read once and keep their type.

Forward keeps the logarithm of each token's sum of exponentials; backward reads the scores again and writes their
gradient. Plain torch makes float32 copies of both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.triton_support import ceil_div, power_of_2

BLOCK = 4096  # scores of a token that a program holds at a time
WARPS = 8


@triton.jit
def _cross_entropy_forward(logits, targets, losses, sums, vocabulary, BLOCK: tl.constexpr):
    begin()
    token = tl.program_id(0).to(tl.int64)
    scores = logits + token * vocabulary
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        score = tl.load(scores + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # until the first finite score, all shares are zero
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(score - base), 0)
        largest = higher
    log_sum = largest + tl.log(total)
    right = tl.load(scores + tl.load(targets + token)).to(tl.float32)
    tl.store(losses + token, log_sum - right)
    tl.store(sums + token, log_sum)


@triton.jit
def _cross_entropy_backward(logits, targets, grad, sums, out, vocabulary, BLOCK: tl.constexpr):
    begin()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocabulary
    score = tl.load(logits + token * vocabulary + column, mask=mask, other=float("-inf")).to(tl.float32)
    share = tl.exp(score - tl.load(sums + token))
    wrong = share - tl.where(column == tl.load(targets + token), 1.0, 0.0)
    found = wrong * tl.load(grad + token)
    tl.store(out + token * vocabulary + column, found.to(out.dtype.element_ty), mask=mask)


def _launch(kernel, parts, logits, *tensors) -> None:
    """Run ``kernel`` with one program per token, or with ``parts`` one for each block of its scores."""
    tokens, vocabulary = logits.shape
    block = min(power_of_2(vocabulary), BLOCK)
    if tokens:
        grid = (tokens, ceil_div(vocabulary, block)) if parts else (tokens,)
        launch(kernel, grid, logits.contiguous(), *tensors, vocabulary, BLOCK=block, num_warps=WARPS)


def _run(logits, targets):
    losses, sums = _allocate(logits, targets)
    _launch(_cross_entropy_forward, False, logits, targets.contiguous(), losses, sums)
    return losses, sums


def _allocate(logits, targets):
    return tuple(logits.new_empty(len(targets), dtype=torch.float32) for _ in range(2))


def _run_backward(grad, logits, targets, sums):
    out = _allocate_backward(grad, logits, targets, sums)
    _launch(_cross_entropy_backward, True, logits, targets.contiguous(), grad.contiguous(), sums, out)
    return out


def _allocate_backward(grad, logits, targets, sums):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx, grad: Tensor, unused: Tensor | None):
    return _gradient(grad, *ctx.saved_tensors), None


# (N, V) scores, (N,) ids → (N,) losses and (N,) logarithms of the sums, in float32. The latter have no gradient.
cross_entropy = define("cross_entropy", schema_of(_allocate, 2), _run, _allocate, _save, _differentiate)
_gradient = define("cross_entropy_backward", schema_of(_allocate_backward), _run_backward, _allocate_backward)
