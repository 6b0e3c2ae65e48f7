"""The weighted gather-sum in one Triton kernel each way, without atomics and with the gradient of the weights.

In forward, a program has some tokens and reads the k rows of each. In backward, it has some rows: for each it reads the
token's gradient, writes the row's gradient, and stores the dot product of the row and the token's gradient, which is
the gradient of the weight. Without weights it is the sum of each token's rows (``sum_rows``). Rows after the last group
(``ends``) are neither read nor written.
"""

import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.tiles import Tiling, load_rows
from intbmoe.ops.triton_support import ceil_div, empty_rows, in_rows

TILING = Tiling(elements=512, per_lane=8)


@triton.jit
def _combine_forward(
    rows, weights, inverse, ends, out, tokens, count,
    GROUPS: tl.constexpr, ROW_STRIDE: tl.constexpr, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    if GROUPS > 0:
        count = tl.load(ends + GROUPS - 1)
    total = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    for number in tl.static_range(CHOICES):
        place = token * CHOICES + number
        row = tl.load(inverse + place, mask=token < tokens, other=count)
        mask = (row < count)[:, None] & (column < WIDTH)[None, :]
        values = load_rows(rows, row, column, ROW_STRIDE, mask)
        if WEIGHTED:
            values *= tl.load(weights + place, mask=token < tokens, other=0.0).to(tl.float32)[:, None]
        total += values
    mask = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    tl.store(out + token[:, None] * WIDTH + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_backward(
    grad, rows, weights, token, choice, ends, row_grad, weight_grad, count,
    GROUPS: tl.constexpr, GRAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_GRAD_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    if GROUPS > 0:
        count = tl.load(ends + GROUPS - 1)
    there = row < count
    mask = there[:, None] & (column < WIDTH)[None, :]
    own = tl.load(choice + row, mask=there, other=0)
    weight = tl.load(weights + own, mask=there, other=0.0).to(tl.float32)
    dy = load_rows(grad, tl.load(token + row, mask=there, other=0), column, GRAD_STRIDE, mask)
    product = tl.sum(dy * load_rows(rows, row, column, ROW_STRIDE, mask), 1)
    tl.store(weight_grad + own, product.to(weight_grad.dtype.element_ty), mask=there)
    place = row[:, None] * ROW_GRAD_STRIDE + column[None, :]
    tl.store(row_grad + place, (weight[:, None] * dy).to(row_grad.dtype.element_ty), mask=mask)


def _run(rows, weights, token, choice, inverse, ends):
    out = _allocate(rows, weights, token, choice, inverse, ends)
    return _launch(rows, weights.contiguous(), inverse, ends, out)


def run_sum(rows: Tensor, inverse: Tensor, ends: Tensor | None) -> Tensor:
    """Compute ``sum_rows`` by the kernel, without autograd."""
    return _launch(rows, None, inverse, ends, rows.new_empty(inverse.shape[0], rows.shape[1]))


def _launch(rows: Tensor, weights: Tensor | None, inverse: Tensor, ends: Tensor | None, out: Tensor) -> Tensor:
    (tokens, choices), width = inverse.shape, rows.shape[1]
    sizes = TILING.tile(width)
    if tokens:
        rows = in_rows(rows)
        launch(
            _combine_forward, (ceil_div(tokens, sizes["TILE"]),),
            rows, weights, inverse.contiguous(), ends, out, tokens, rows.shape[0],
            GROUPS=0 if ends is None else ends.shape[0],
            ROW_STRIDE=rows.stride(0), WIDTH=width, CHOICES=choices, WEIGHTED=weights is not None, **sizes,
        )  # fmt: skip
    return out


def _allocate(rows, weights, token, choice, inverse, ends):
    return weights.new_empty(inverse.shape[0], rows.shape[1])


def _run_backward(grad, rows, weights, token, choice, ends):
    row_grad, weight_grad = _allocate_backward(grad, rows, weights, token, choice, ends)
    if ends is not None or rows.shape[0] < weights.numel():
        weight_grad.zero_()  # choices without a row
    count, width = rows.shape
    sizes = TILING.tile(width)
    if count:
        grad, rows = in_rows(grad), in_rows(rows)
        launch(
            _combine_backward, (ceil_div(count, sizes["TILE"]),),
            grad, rows, weights.contiguous(), token, choice, ends, row_grad, weight_grad, count, WIDTH=width,
            GROUPS=0 if ends is None else ends.shape[0],
            GRAD_STRIDE=grad.stride(0), ROW_STRIDE=rows.stride(0), ROW_GRAD_STRIDE=row_grad.stride(0), **sizes,
        )  # fmt: skip
    return row_grad, weight_grad


def _allocate_backward(grad, rows, weights, token, choice, ends):
    return empty_rows(rows, *rows.shape), weights.new_empty(weights.shape)


def _save(ctx, inputs, output):
    rows, weights, token, choice, _, ends = inputs
    ctx.save_for_backward(rows, weights, token, choice, ends)


def _differentiate(ctx, grad):
    return *_combine_gradient(grad, *ctx.saved_tensors), None, None, None, None


# The same as ``naive.combine``; ``token`` and ``choice`` (M,) give the token and choice of each row, for the gradient.
# ``ends`` are the groups' ends, if rows may follow the last group: those are not read and have no gradient.
combine = define("combine", schema_of(_allocate), _run, _allocate, _save, _differentiate)
_combine_gradient = define("combine_backward", schema_of(_allocate_backward, 2), _run_backward, _allocate_backward)
