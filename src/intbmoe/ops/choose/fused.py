"""Softmax, choice and gather in one Triton kernel; a row of scores stays in registers."""

import torch
import triton
import triton.language as tl

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.triton_support import ceil_div, power_of_2

ELEMENTS = 1024


@triton.jit
def _softmax(scores, token, tokens, column, CHOICES: tl.constexpr):
    mask = (token < tokens)[:, None] & (column < CHOICES)[None, :]
    score = tl.load(scores + token[:, None] * CHOICES + column[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    score = tl.where((token < tokens)[:, None], score, 0.0)
    power = tl.exp(score - tl.max(score, 1)[:, None])
    return score, power / tl.sum(power, 1)[:, None]


@triton.jit
def _choose_forward(
    scores, ids, weights, tokens, CHOICES: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr
):
    begin()
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, PADDED)
    score, probability = _softmax(scores, token, tokens, column, CHOICES)
    # As in torch's sort, a NaN is larger than anything. It makes its own token's weights NaN, but no other token's.
    key = tl.where(score != score, float("inf"), score)
    # A choice is removed by its index, not its score: a score of −∞ may be chosen too, after the others.
    free = tl.broadcast_to((column < CHOICES)[None, :], [TILE, PADDED])
    for number in tl.static_range(K):
        best = tl.max(tl.where(free, key, float("-inf")), 1)
        index = tl.min(tl.where(free & (key == best[:, None]), column[None, :], PADDED), 1)
        taken = column[None, :] == index[:, None]
        weight = tl.sum(tl.where(taken, probability, 0.0), 1)
        free = free & (column[None, :] != index[:, None])
        tl.store(ids + token * K + number, index.to(tl.int64), mask=token < tokens)
        tl.store(weights + token * K + number, weight.to(weights.dtype.element_ty), mask=token < tokens)


@triton.jit
def _choose_backward(
    grad, scores, ids, out, tokens, CHOICES: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr
):
    begin()
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, PADDED)
    _, probability = _softmax(scores, token, tokens, column, CHOICES)
    dweight = tl.zeros([TILE, PADDED], dtype=tl.float32)
    for number in tl.static_range(K):
        index = tl.load(ids + token * K + number, mask=token < tokens, other=0)
        own = tl.load(grad + token * K + number, mask=token < tokens, other=0.0).to(tl.float32)
        dweight += tl.where(column[None, :] == index[:, None], own[:, None], 0.0)
    inner = tl.sum(dweight * probability, 1)
    dscore = probability * (dweight - inner[:, None])
    mask = (token < tokens)[:, None] & (column < CHOICES)[None, :]
    tl.store(out + token[:, None] * CHOICES + column[None, :], dscore.to(out.dtype.element_ty), mask=mask)


def _sizes(choices: int) -> dict[str, int]:
    padded = power_of_2(choices, 2)
    return {"CHOICES": choices, "PADDED": padded, "TILE": max(1, ELEMENTS // padded)}


def _run(scores, k):
    ids, weights = _allocate(scores, k)
    tokens = scores.shape[0]
    sizes = _sizes(scores.shape[1])
    if tokens:
        launch(
            _choose_forward, (ceil_div(tokens, sizes["TILE"]),),
            scores.contiguous(), ids, weights, tokens, K=k, **sizes,
        )  # fmt: skip
    return ids, weights


def _allocate(scores, k: int):
    return scores.new_empty(scores.shape[0], k, dtype=torch.int64), scores.new_empty(scores.shape[0], k)


def _run_backward(grad, scores, ids):
    out = _allocate_backward(grad, scores, ids)
    (tokens, choices), k = scores.shape, ids.shape[1]
    sizes = _sizes(choices)
    if tokens:
        launch(
            _choose_backward, (ceil_div(tokens, sizes["TILE"]),),
            grad.contiguous(), scores.contiguous(), ids, out, tokens, K=k, **sizes,
        )  # fmt: skip
    return out


def _allocate_backward(grad, scores, ids):
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[0])


def _differentiate(ctx, _, grad):
    return _choose_gradient(grad, *ctx.saved_tensors), None


# The same as ``naive.choose``.
choose = define("choose", schema_of(_allocate, 2), _run, _allocate, _save, _differentiate)
_choose_gradient = define("choose_backward", schema_of(_allocate_backward), _run_backward, _allocate_backward)
