"""Both of the router's products and the cast of its tokens in one Triton kernel forward and one backward.

Products are as exact as in float32, so that rounding does not change the routing: each is three TF32 products on tensor
cores or, in backward, six in bfloat16. These take fewer registers and instructions, because Hopper's tensor cores
read transposed matrices in bfloat16 but not in TF32, and because what is split once serves several products.

Backward has programs for the gradient of tokens, to which they add that of the cast tokens, and others that sum the
gradients of parameters over a chunk of tokens. Both compute the hidden layer's gradient, which takes less time than to
store it and wait for it. They are one launch: with few tokens, neither would fill a large GPU. Sums over tokens are
taken in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define
from intbmoe.ops.overlap import begin
from intbmoe.ops.pieces import multiply_pieces, split, transposed
from intbmoe.ops.tiles import power_below, relu, sum_programs
from intbmoe.ops.triton_support import ceil_div, multiprocessors, power_of_2, shared_memory
from intbmoe.precision import autocast_off, wide

TOKENS, INPUTS, WARPS, STAGES = 64, 32, 4, 3
"""A program's tokens, its inputs per step, warps and stages, measured on an H200."""
FEW_TOKENS, FEW_INPUTS = 16, 64
"""Tokens and inputs if the device has a multiprocessor for each such program: then only one program's time counts."""
BACKWARD_TOKENS, BACKWARD_SPAN, BACKWARD_WARPS = 64, 256, 4
"""Tokens, inputs and warps of a program for the tokens' gradient. Backward's values were chosen by registers and
instructions; on an H200, only these were measured."""
BACKWARD_SHARED, BACKWARD_SMALL = 200_000, 32
"""GPUs with fewer bytes of shared memory multiply from registers, which do not suffice for more tokens than the second.
Hopper's fastest instructions, which read shared memory, need 64 tokens."""
BACKWARD_INPUTS, BACKWARD_STAGES = 64, 3
BACKWARD_WIDE = 32, 2
"""Inputs and stages of all programs' steps; the second with more than 64 hidden units, so that small GPUs have enough
shared memory, for which they need a single stage if there are also more than 32 choices. On an H200, the first leave
room for three programs on a multiprocessor."""
ROWS, STEPS = 32, 16
"""Tokens of a step, and steps, of a program that sums parameters' gradients. The same on all devices, as sums
depend on it."""
BACKWARD_CHOICES = 64
"""With more of them the backward kernel would run out of registers, and torch's products are faster."""
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
    h = relu(total + tl.load(b1 + unit, mask=unit < H, other=0.0).to(tl.float32)[None, :])
    tl.store(hidden + row[:, None] * H + unit[None, :], h, mask=there & (unit < H)[None, :])
    known = (choice < K)[:, None] & (unit < H)[None, :]
    weight = tl.load(w2 + choice[:, None] * H + unit[None, :], mask=known, other=0.0).to(tl.float32)
    score = tl.dot(h, tl.trans(weight), input_precision="tf32x3")
    score += tl.load(b2 + choice, mask=choice < K, other=0.0).to(tl.float32)[None, :]
    tl.store(scores + row[:, None] * K + choice[None, :], score, mask=there & (choice < K)[None, :])


@triton.jit
def _score_weight(w2, H: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, CHOICES: tl.constexpr):
    unit, choice = tl.arange(0, HIDDEN), tl.arange(0, CHOICES)
    known = (choice < K)[:, None] & (unit < H)[None, :]
    return split(tl.load(w2 + choice[:, None] * H + unit[None, :], mask=known, other=0.0).to(tl.float32))


@triton.jit
def _loaded(grad, hidden, row, there, H: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, CHOICES: tl.constexpr):
    """A tile of the scores' gradient, and of the hidden layer."""
    unit, choice = tl.arange(0, HIDDEN), tl.arange(0, CHOICES)
    ds = tl.load(grad + row[:, None] * K + choice[None, :], mask=there & (choice < K)[None, :], other=0.0)
    h = tl.load(hidden + row[:, None] * H + unit[None, :], mask=there & (unit < H)[None, :], other=0.0)
    return ds, h


@triton.jit
def _token_program(
    program, grad, token_grad, w1, w2, hidden, x_grad, count,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, CHOICES: tl.constexpr,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``SPAN`` inputs of some tokens."""
    spans: tl.constexpr = (D + SPAN - 1) // SPAN
    row = (program // spans).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = (row < count)[:, None]
    unit = tl.arange(0, HIDDEN)
    ds, h = _loaded(grad, hidden, row, there, H, K, HIDDEN, CHOICES)
    score_weight = _score_weight(w2, H, K, HIDDEN, CHOICES)
    dh = split(tl.where(h <= 0, 0.0, multiply_pieces(split(ds), score_weight)))
    start = program % spans * SPAN
    for first in tl.range(start, min(start + SPAN, D), INPUTS, num_stages=STAGES):
        k = first + tl.arange(0, INPUTS)
        known = (unit < H)[:, None] & (k < D)[None, :]
        weight = tl.load(w1 + unit[:, None] * D + k[None, :], mask=known, other=0.0).to(tl.float32)
        dx = multiply_pieces(dh, split(weight))
        mask = there & (k < D)[None, :]
        place = row[:, None] * D + k[None, :]
        if token_grad is not None:
            dx += tl.load(token_grad + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_grad + place, dx.to(x_grad.dtype.element_ty), mask=mask)


@triton.jit
def _weight_program(
    chunk, part, grad, x, w2, hidden, partial, count,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, CHOICES: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of ``INPUTS`` columns of the hidden layer's weight over a chunk of tokens."""
    unit = tl.arange(0, HIDDEN)
    k = part * INPUTS + tl.arange(0, INPUTS)
    score_weight = _score_weight(w2, H, K, HIDDEN, CHOICES)
    total = tl.zeros([HIDDEN, INPUTS], dtype=tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = (chunk * STEPS + step) * ROWS + tl.arange(0, ROWS)
        there = (row < count)[:, None]
        ds, h = _loaded(grad, hidden, row, there, H, K, HIDDEN, CHOICES)
        values = tl.load(x + row[:, None] * D + k[None, :], mask=there & (k < D)[None, :], other=0.0).to(tl.float32)
        dh = tl.where(h <= 0, 0.0, multiply_pieces(split(ds), score_weight))
        total += multiply_pieces(transposed(split(dh)), split(values))
    tl.store(partial + unit[:, None] * D + k[None, :], total, mask=(unit < H)[:, None] & (k < D)[None, :])


@triton.jit
def _score_program(
    chunk, grad, w2, hidden, partial, count,
    H: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, CHOICES: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of the hidden layer's bias, and of the scores' weight and bias, over a chunk of tokens."""
    unit, choice = tl.arange(0, HIDDEN), tl.arange(0, CHOICES)
    score_weight = _score_weight(w2, H, K, HIDDEN, CHOICES)
    bias_sum = tl.zeros([ROWS, HIDDEN], dtype=tl.float32)
    score_sum = tl.zeros([HIDDEN, CHOICES], dtype=tl.float32)
    score_bias_sum = tl.zeros([ROWS, CHOICES], dtype=tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = (chunk * STEPS + step) * ROWS + tl.arange(0, ROWS)
        ds, h = _loaded(grad, hidden, row, (row < count)[:, None], H, K, HIDDEN, CHOICES)
        parts = split(ds)
        bias_sum += tl.where(h <= 0, 0.0, multiply_pieces(parts, score_weight))
        score_bias_sum += ds
        score_sum += multiply_pieces(transposed(split(h)), parts)
    tl.store(partial + unit, tl.sum(bias_sum, 0), mask=unit < H)
    place = H + choice[None, :] * H + unit[:, None]
    tl.store(partial + place, score_sum, mask=(unit < H)[:, None] & (choice < K)[None, :])
    tl.store(partial + H + K * H + choice, tl.sum(score_bias_sum, 0), mask=choice < K)


@triton.jit
def _backward(
    grad, token_grad, x, w1, w2, hidden, x_grad, partials, count, first,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, CHOICES: tl.constexpr,
    TOKENS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs from ``first`` on compute gradients of tokens. The longer ones before them sum those of parameters.

    ``partials`` is (chunks, H·D + H + K·H + K), the hidden layer's weight and bias first.
    """
    begin()
    program = tl.program_id(0)
    parts: tl.constexpr = (D + INPUTS - 1) // INPUTS
    chunk, part = (program // (parts + 1)).to(tl.int64), program % (parts + 1)
    partial = partials + chunk * (H * (D + 1) + K * (H + 1))
    if program >= first:
        _token_program(
            program - first, grad, token_grad, w1, w2, hidden, x_grad, count,
            D, H, K, HIDDEN, CHOICES, TOKENS, INPUTS, SPAN, STAGES,
        )  # fmt: skip
    elif part < parts:
        _weight_program(
            chunk, part, grad, x, w2, hidden, partial, count,
            D, H, K, HIDDEN, CHOICES, ROWS, INPUTS, STEPS, STAGES,
        )  # fmt: skip
    else:
        _score_program(
            chunk, grad, w2, hidden, partial + H * D, count, H, K, HIDDEN, CHOICES, ROWS, STEPS, STAGES
        )  # fmt: skip


def _sizes(x: Tensor, weight: Tensor, score_weight: Tensor) -> dict[str, int]:
    hidden, choices = weight.shape[0], score_weight.shape[0]
    padded = {"HIDDEN": power_of_2(hidden, 16), "CHOICES": power_of_2(choices, 16)}
    return {"D": x.shape[1], "H": hidden, "K": choices, **padded}


def _many(x: Tensor) -> bool:
    """Whether there are more tokens than the multiprocessors take at once, each a program of few."""
    return ceil_div(x.shape[0], FEW_TOKENS) > multiprocessors(x.device)


def _forward_tile(x: Tensor, hidden: int) -> tuple[int, int]:
    """A program's tokens, and its inputs per step."""
    if _many(x):
        return TOKENS, INPUTS
    return FEW_TOKENS, FEW_INPUTS if hidden <= 64 else INPUTS  # so that weights fit into a small GPU's shared memory


def _run(x, weight, bias, score_weight, score_bias, dtype):
    scores, hidden, tokens = _allocate(x, weight, bias, score_weight, score_bias, dtype)
    if x.shape[0]:
        x, parameters = x.contiguous(), [tensor.contiguous() for tensor in (weight, bias, score_weight, score_bias)]
        sizes = _sizes(x, weight, score_weight)
        tile, inputs = _forward_tile(x, sizes["HIDDEN"])
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
    count, width = x.shape
    if count == 0:
        return x_grad, sums.zero_()
    small, wide_layer = shared_memory(x.device) < BACKWARD_SHARED, weight.shape[0] > 64
    inputs, stages = BACKWARD_WIDE if wide_layer else (BACKWARD_INPUTS, BACKWARD_STAGES)
    if small and wide_layer and score_weight.shape[0] > 32:
        stages = 1
    tokens = (BACKWARD_SMALL if small else BACKWARD_TOKENS) if _many(x) else FEW_TOKENS
    steps = _steps_per_program(x, inputs)
    chunks = ceil_div(count, ROWS * steps)
    partials = sums.new_empty(chunks, len(sums)) if chunks > 1 else sums[None]
    first = chunks * (ceil_div(width, inputs) + 1)
    launch(
        _backward, (first + ceil_div(count, tokens) * ceil_div(width, BACKWARD_SPAN),),
        grad.contiguous(), None if token_grad is None else token_grad.contiguous(), x.contiguous(),
        weight.contiguous(), score_weight.contiguous(), hidden, x_grad, partials, count, first,
        **_sizes(x, weight, score_weight), TOKENS=tokens, SPAN=BACKWARD_SPAN, ROWS=ROWS, INPUTS=inputs,
        STEPS=steps, STAGES=stages, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return x_grad, sum_programs(partials) if chunks > 1 else sums


def _steps_per_program(x: Tensor, inputs: int) -> int:
    """Steps of a program that sums; with few tokens they are few, so that all multiprocessors get programs."""
    programs = ceil_div(x.shape[1], inputs) + 1  # for the same tokens
    return power_below(x.shape[0] * programs // (ROWS * ENOUGH_PROGRAMS), STEPS)


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
    gradients = [part.view(shape).to(dtype) for part, shape, dtype in zip(parts, shapes, ctx.dtypes, strict=True)]
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
