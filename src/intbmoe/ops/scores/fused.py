"""Both of the router's products and the cast of its tokens in one Triton kernel forward and one backward.

Products are as exact as in float32, so that rounding does not change the routing: each is three TF32 products on tensor
cores. Backward also adds the gradient of the cast tokens to its own. Sums over tokens are taken in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define
from intbmoe.ops.overlap import begin
from intbmoe.ops.tiles import power_below, sum_programs
from intbmoe.ops.triton_support import ceil_div, multiprocessors, power_of_2, shared_memory
from intbmoe.precision import autocast_off, wide

TOKENS, INPUTS, WARPS, STAGES = 64, 32, 4, 3
"""A program's tokens, its inputs per step, warps and stages. Measured on an H200, like the values below."""
FEW_TOKENS, FEW_INPUTS = 16, 64
"""Tokens and inputs if the device has a multiprocessor for each such program: then only one program's time counts."""
BACKWARD_TILES, BACKWARD_WARPS = 16, 4
BACKWARD, BACKWARD_SMALL = (32, 64, 2), (16, 32, 1)
"""A program's tokens per step, inputs and stages; the second for GPUs with too little shared memory for the first."""
BACKWARD_CHOICES = 64
"""With more of them the backward kernel would run out of registers, and torch's products are faster."""
BACKWARD_SHARED = 200_000  # bytes
ENOUGH_PROGRAMS = 512  # to keep a large GPU busy


def router_scores(
    x: Tensor, hidden: tuple[Tensor, Tensor], scores: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As ``naive.router_scores``."""
    found, _, tokens = _router_scores(x, *hidden, *scores, dtype)
    return found, x if x.dtype == dtype else tokens


@triton.jit
def _forward(
    x, w1, b1, w2, b2, scores, hidden, tokens, count,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, CHOICES: tl.constexpr,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = (row < count)[:, None]
    unit = tl.arange(0, HIDDEN)
    choice = tl.arange(0, CHOICES)
    total = tl.zeros([TOKENS, HIDDEN], dtype=tl.float32)
    for first in range(0, D, INPUTS):
        k = first + tl.arange(0, INPUTS)
        mask = there & (k < D)[None, :]
        place = row[:, None] * D + k[None, :]
        values = tl.load(x + place, mask=mask, other=0.0)
        if CAST:
            tl.store(tokens + place, values.to(tokens.dtype.element_ty), mask=mask)
        known = (unit < H)[:, None] & (k < D)[None, :]
        weight = tl.load(w1 + unit[:, None] * D + k[None, :], mask=known, other=0.0).to(tl.float32)
        total = tl.dot(values.to(tl.float32), tl.trans(weight), total, input_precision="tf32x3")
    h = tl.maximum(total + tl.load(b1 + unit, mask=unit < H, other=0.0).to(tl.float32)[None, :], 0.0)
    tl.store(hidden + row[:, None] * H + unit[None, :], h, mask=there & (unit < H)[None, :])
    known = (choice < K)[:, None] & (unit < H)[None, :]
    weight = tl.load(w2 + choice[:, None] * H + unit[None, :], mask=known, other=0.0).to(tl.float32)
    score = tl.dot(h, tl.trans(weight), input_precision="tf32x3")
    score += tl.load(b2 + choice, mask=choice < K, other=0.0).to(tl.float32)[None, :]
    tl.store(scores + row[:, None] * K + choice[None, :], score, mask=there & (choice < K)[None, :])


@triton.jit
def _gradients(grad, hidden, row, there, unit, choice, H: tl.constexpr, K: tl.constexpr):
    """A tile of the scores' gradient, and of the hidden layer."""
    ds = tl.load(grad + row[:, None] * K + choice[None, :], mask=there & (choice < K)[None, :], other=0.0)
    h = tl.load(hidden + row[:, None] * H + unit[None, :], mask=there & (unit < H)[None, :], other=0.0)
    return ds, h


@triton.jit
def _backward(
    grad, token_grad, x, w1, w2, hidden, x_grad, sums, count,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, CHOICES: tl.constexpr,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``sums`` (programs, H·D + H + K·H + K) are those of weights and biases, the hidden layer's first."""
    begin()
    chunk, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    unit = tl.arange(0, HIDDEN)
    choice = tl.arange(0, CHOICES)
    own_sums = sums + chunk * (H * (D + 1) + K * (H + 1))
    k = part * INPUTS + tl.arange(0, INPUTS)
    known = (choice < K)[:, None] & (unit < H)[None, :]
    score_weight = tl.load(w2 + choice[:, None] * H + unit[None, :], mask=known, other=0.0).to(tl.float32)
    if part < tl.cdiv(D, INPUTS):
        own = (unit < H)[:, None] & (k < D)[None, :]
        weight = tl.load(w1 + unit[:, None] * D + k[None, :], mask=own, other=0.0).to(tl.float32)
        weight_sum = tl.zeros([HIDDEN, INPUTS], dtype=tl.float32)
        for tile in range(TILES):
            row = (chunk * TILES + tile) * TOKENS + tl.arange(0, TOKENS)
            there = (row < count)[:, None]
            ds, h = _gradients(grad, hidden, row, there, unit, choice, H, K)
            dh = tl.where(h > 0, tl.dot(ds, score_weight, input_precision="tf32x3"), 0.0)
            mask = there & (k < D)[None, :]
            place = row[:, None] * D + k[None, :]
            dx = tl.dot(dh, weight, input_precision="tf32x3")
            if token_grad is not None:
                dx += tl.load(token_grad + place, mask=mask, other=0.0).to(tl.float32)
            tl.store(x_grad + place, dx.to(x_grad.dtype.element_ty), mask=mask)
            values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
            weight_sum = tl.dot(tl.trans(dh), values, weight_sum, input_precision="tf32x3")
        tl.store(own_sums + unit[:, None] * D + k[None, :], weight_sum, mask=own)
    else:  # separate programs, because all sums together would not fit into registers
        bias_sum = tl.zeros([TOKENS, HIDDEN], dtype=tl.float32)
        score_sum = tl.zeros([CHOICES, HIDDEN], dtype=tl.float32)
        score_bias_sum = tl.zeros([TOKENS, CHOICES], dtype=tl.float32)
        for tile in range(TILES):
            row = (chunk * TILES + tile) * TOKENS + tl.arange(0, TOKENS)
            ds, h = _gradients(grad, hidden, row, (row < count)[:, None], unit, choice, H, K)
            bias_sum += tl.where(h > 0, tl.dot(ds, score_weight, input_precision="tf32x3"), 0.0)
            score_bias_sum += ds
            score_sum = tl.dot(tl.trans(ds), h, score_sum, input_precision="tf32x3")
        tl.store(own_sums + H * D + unit, tl.sum(bias_sum, 0), mask=unit < H)
        score_sums = own_sums + H * (D + 1)
        place = choice[:, None] * H + unit[None, :]
        tl.store(score_sums + place, score_sum, mask=(choice < K)[:, None] & (unit < H)[None, :])
        tl.store(score_sums + K * H + choice, tl.sum(score_bias_sum, 0), mask=choice < K)


def _sizes(x: Tensor, weight: Tensor, score_weight: Tensor) -> dict[str, int]:
    hidden, choices = weight.shape[0], score_weight.shape[0]
    padded = {"HIDDEN": power_of_2(hidden, 16), "CHOICES": power_of_2(choices, 16)}
    return {"D": x.shape[1], "H": hidden, "K": choices, **padded}


def _tile(x: Tensor, hidden: int) -> tuple[int, int]:
    """A program's tokens, and its inputs per step."""
    if ceil_div(x.shape[0], FEW_TOKENS) > multiprocessors(x.device):
        return TOKENS, INPUTS
    return FEW_TOKENS, FEW_INPUTS if hidden <= 64 else INPUTS  # so that weights fit into a small GPU's shared memory


def _run(x, weight, bias, score_weight, score_bias, dtype):
    scores, hidden, tokens = _allocate(x, weight, bias, score_weight, score_bias, dtype)
    if x.shape[0]:
        x, parameters = x.contiguous(), [tensor.contiguous() for tensor in (weight, bias, score_weight, score_bias)]
        sizes = _sizes(x, weight, score_weight)
        tile, inputs = _tile(x, sizes["HIDDEN"])
        launch(
            _forward, (ceil_div(x.shape[0], tile),),
            x, *parameters, scores, hidden, tokens, x.shape[0], **sizes,
            TOKENS=tile, INPUTS=inputs, CAST=dtype != x.dtype, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return scores, hidden, tokens


def _allocate(x, weight, bias, score_weight, score_bias, dtype):
    count = x.shape[0]
    return (
        x.new_empty(count, score_weight.shape[0], dtype=torch.float32),
        x.new_empty(count, weight.shape[0], dtype=torch.float32),
        x.new_empty(0 if dtype == x.dtype else count, x.shape[1], dtype=dtype),
    )


def _run_backward(grad, token_grad, x, weight, score_weight, hidden):
    if score_weight.shape[0] > BACKWARD_CHOICES:
        return _backward_by_torch(grad, token_grad, x, weight, score_weight, hidden)
    x_grad, sums = _allocate_backward(grad, token_grad, x, weight, score_weight, hidden)
    if x.shape[0] == 0:
        return x_grad, sums.zero_()
    rows, inputs, stages = BACKWARD if shared_memory(x.device) >= BACKWARD_SHARED else BACKWARD_SMALL
    parts = ceil_div(x.shape[1], inputs) + 1
    # With few tokens, programs are small, so that all multiprocessors get some.
    tiles = min(BACKWARD_TILES, power_below(x.shape[0] * parts // (rows * ENOUGH_PROGRAMS)))
    chunks = ceil_div(x.shape[0], rows * tiles)
    partials = sums.new_empty(chunks, len(sums)) if chunks > 1 else sums[None]
    launch(
        _backward, (chunks, parts),
        grad.contiguous(), None if token_grad is None else token_grad.contiguous(), x.contiguous(),
        weight.contiguous(), score_weight.contiguous(), hidden, x_grad, partials, x.shape[0],
        **_sizes(x, weight, score_weight), TOKENS=rows, INPUTS=inputs, TILES=tiles,
        num_warps=BACKWARD_WARPS, num_stages=stages,
    )  # fmt: skip
    return x_grad, sum_programs(partials) if chunks > 1 else sums


def _backward_by_torch(grad, token_grad, x, weight, score_weight, hidden):
    with autocast_off(x):
        hidden_grad = torch.ops.aten.threshold_backward(grad @ wide(score_weight), hidden, 0)
        x_grad = hidden_grad @ wide(weight)
        if token_grad is not None:
            x_grad += token_grad
        products = hidden_grad.t() @ wide(x), hidden_grad.sum(0), grad.t() @ hidden, grad.sum(0)
    return x_grad.to(x.dtype), torch.cat([product.flatten() for product in products])


def _allocate_backward(grad, token_grad, x, weight, score_weight, hidden):
    count = weight.numel() + weight.shape[0] + score_weight.numel() + score_weight.shape[0]
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(count, dtype=torch.float32)


def _save(ctx, inputs, output):
    x, weight, bias, score_weight, score_bias, _ = inputs
    ctx.dtypes = weight.dtype, bias.dtype, score_weight.dtype, score_bias.dtype
    ctx.save_for_backward(x, weight, score_weight, output[1])


def _differentiate(ctx, grad, _, token_grad):
    x, weight, score_weight, hidden = ctx.saved_tensors
    if grad is None:
        return None if token_grad is None else token_grad.to(x.dtype), None, None, None, None, None
    if token_grad is not None and token_grad.shape[0] != x.shape[0]:
        token_grad = None  # it belongs to the empty tensor that is returned if no cast is needed
    x_grad, sums = _router_gradient(grad, token_grad, x, weight, score_weight, hidden)
    # Each part is a contiguous view of ``sums``, so that autograd takes it without a copy.
    shapes = weight.shape, weight.shape[:1], score_weight.shape, score_weight.shape[:1]
    parts = sums.split([shape.numel() for shape in shapes])
    gradients = (part.view(shape).to(dtype) for part, shape, dtype in zip(parts, shapes, ctx.dtypes, strict=True))
    return x_grad, *gradients, None


_router_scores = define(
    "router_scores",
    "(Tensor x, Tensor weight, Tensor bias, Tensor score_weight, Tensor score_bias, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _run,
    _allocate,
    _save,
    _differentiate,
)
_router_gradient = define(
    "router_scores_backward",
    "(Tensor grad, Tensor? token_grad, Tensor x, Tensor weight, Tensor score_weight, Tensor hidden) "
    "-> (Tensor, Tensor)",
    _run_backward,
    _allocate_backward,
)


def _products(x_shape: tuple, weight_shape: tuple, score_shape: tuple) -> int:
    return 2 * x_shape[0] * weight_shape[0] * (weight_shape[1] + score_shape[0])


@register_flop_formula(torch.ops.intbmoe.router_scores)
def _(x_shape, weight_shape, bias_shape, score_weight_shape, *_, **__):
    return _products(x_shape, weight_shape, score_weight_shape)


@register_flop_formula(torch.ops.intbmoe.router_scores_backward)
def _(grad_shape, token_shape, x_shape, weight_shape, score_weight_shape, *_, **__):
    return 2 * _products(x_shape, weight_shape, score_weight_shape)
