"""Gather and filter in one Triton kernel: a program reads its tokens once and writes the k rows of each.

In backward, one kernel sums over a token's rows (dx and the token term's gradient), another over a block's (the block
term's gradient).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.branches import aside
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.permute import Permutation
from intbmoe.ops.tiles import Tiling, load_rows, programs, rows_of_program, sigmoid, sum_partials, tiling_for
from intbmoe.ops.triton_support import ceil_div, empty_rows, in_rows, power_of_2

TOKENS = Tiling(elements=512, per_lane=8)
BLOCKS = {
    512: Tiling(elements=256, per_lane=8, tiles=32, stages=3),
    None: Tiling(elements=512, per_lane=16, tiles=32, stages=3),
}


def filter_rows(x: Tensor, token_term: Tensor | None, block_term: Tensor | None, plan: Permutation) -> Tensor:
    """(N, d) tokens → (M, d) rows sorted by group, filtered if there are terms; uninitialised after the last group."""
    return _filter_rows(x, token_term, block_term, plan.token, plan.inverse, plan.group, plan.ends)


@triton.jit
def _filter_rows_forward(
    x, token_term, block_term, inverse, group, ends, out, tokens,
    X_STRIDE: tl.constexpr, TERM_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    FILTER: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    there = (token < tokens)[:, None] & inside[None, :]
    count = tl.load(ends + GROUPS - 1)
    values = load_rows(x, token, column, X_STRIDE, there)
    if FILTER:
        term = load_rows(token_term, token, column, TERM_STRIDE, there)
    rows, results = (), ()
    for number in tl.static_range(CHOICES):  # all loads come before the first store: none is moved past it
        row = tl.load(inverse + token * CHOICES + number, mask=token < tokens, other=count)
        z = values
        if FILTER:
            block = tl.load(group + row, mask=row < count, other=0)
            z = values * sigmoid(term + load_rows(block_term, block, column, WIDTH, there & (row < count)[:, None]))
        rows += (row,)
        results += (z.to(out.dtype.element_ty),)
    for number in tl.static_range(CHOICES):
        row = rows[number]
        place = row[:, None] * OUT_STRIDE + column[None, :]
        tl.store(out + place, results[number], mask=(row < count)[:, None] & inside[None, :])


@triton.jit
def _filter_tokens_backward(
    grad, x, token_term, block_term, inverse, group, ends, x_grad, term_grad, tokens,
    GRAD_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, TERM_STRIDE: tl.constexpr,
    FILTER: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    there = (token < tokens)[:, None] & inside[None, :]
    count = tl.load(ends + GROUPS - 1)
    dx = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    dterm = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    if FILTER:
        values = load_rows(x, token, column, X_STRIDE, there)
        term = load_rows(token_term, token, column, TERM_STRIDE, there)
    for number in tl.static_range(CHOICES):
        row = tl.load(inverse + token * CHOICES + number, mask=token < tokens, other=count)
        live = row < count
        mask = live[:, None] & inside[None, :]
        dz = load_rows(grad, row, column, GRAD_STRIDE, mask)
        if FILTER:
            block = tl.load(group + row, mask=live, other=0)
            opened = sigmoid(term + load_rows(block_term, block, column, WIDTH, mask))
            dterm += dz * values * opened * (1 - opened)
            dz = dz * opened
        dx += dz
    place = token[:, None] * WIDTH + column[None, :]
    tl.store(x_grad + place, dx.to(x_grad.dtype.element_ty), mask=there)
    if FILTER:
        tl.store(term_grad + place, dterm.to(term_grad.dtype.element_ty), mask=there)


@triton.jit
def _filter_blocks_backward(
    grad, x, token_term, block_term, token, ends, partials,
    GRAD_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, TERM_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    if first < end:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        block = tl.load(block_term + group * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        for start in tl.range(0, ROWS, TILE, num_stages=STAGES):
            row = first + start + tl.arange(0, TILE)
            live = row < end
            mask = live[:, None] & inside[None, :]
            own = tl.load(token + row, mask=live, other=0)
            opened = sigmoid(load_rows(token_term, own, column, TERM_STRIDE, mask) + block[None, :])
            dz = load_rows(grad, row, column, GRAD_STRIDE, mask)
            total += dz * load_rows(x, own, column, X_STRIDE, mask) * opened * (1 - opened)
        partial = partials + tl.program_id(0).to(tl.int64) * WIDTH + column
        tl.store(partial, tl.sum(total, 0), mask=inside)


def _laid_out(x, token_term, block_term):
    if token_term is None:
        return in_rows(x), None, None
    return in_rows(x), in_rows(token_term), block_term.contiguous()


def _run(x, token_term, block_term, token, inverse, group, ends):
    out = _allocate(x, token_term, block_term, token, inverse, group, ends)
    x, token_term, block_term = _laid_out(x, token_term, block_term)
    tokens, choices = inverse.shape
    sizes = TOKENS.tile(x.shape[1])
    if tokens:
        launch(
            _filter_rows_forward, (ceil_div(tokens, sizes["TILE"]),),
            x, token_term, block_term, inverse, group, ends, out, tokens,
            X_STRIDE=x.stride(0), TERM_STRIDE=0 if token_term is None else token_term.stride(0),
            OUT_STRIDE=out.stride(0), WIDTH=x.shape[1],
            FILTER=token_term is not None, CHOICES=choices, GROUPS=ends.shape[0], **sizes,
        )  # fmt: skip
    return out


def _allocate(x, token_term, block_term, token, inverse, group, ends):
    return empty_rows(x, token.shape[0], x.shape[1])


def _strides(grad, x, token_term) -> dict[str, int]:
    term_stride = 0 if token_term is None else token_term.stride(0)
    return {"GRAD_STRIDE": grad.stride(0), "X_STRIDE": x.stride(0), "TERM_STRIDE": term_stride, "WIDTH": x.shape[1]}


def _run_tokens_backward(grad, x, token_term, block_term, inverse, group, ends):
    x_grad, term_grad = _allocate_tokens_backward(grad, x, token_term, block_term, inverse, group, ends)
    x, token_term, block_term = _laid_out(x, token_term, block_term)
    tokens, choices = inverse.shape
    grad, sizes = in_rows(grad), TOKENS.tile(x.shape[1])
    if tokens:
        launch(
            _filter_tokens_backward, (ceil_div(tokens, sizes["TILE"]),),
            grad, x, token_term, block_term, inverse, group, ends, x_grad, term_grad, tokens,
            **_strides(grad, x, token_term),
            FILTER=token_term is not None, CHOICES=choices, GROUPS=ends.shape[0], **sizes,
        )  # fmt: skip
    return x_grad, term_grad


def _allocate_tokens_backward(grad, x, token_term, block_term, inverse, group, ends):
    return x.new_empty(x.shape), x.new_empty(0 if token_term is None else x.shape[0], x.shape[1])


def _run_blocks_backward(grad, x, token_term, block_term, token, ends):
    x, token_term, block_term = _laid_out(x, token_term, block_term)
    width, groups = x.shape[1], ends.shape[0]
    grad, sizes = in_rows(grad), tiling_for(width, BLOCKS).chunk(width, token.shape[0])
    partials = x.new_empty(programs(token.shape[0], groups, sizes["ROWS"]), width, dtype=torch.float32)
    if token.shape[0]:
        launch(
            _filter_blocks_backward, (len(partials),),
            grad, x, token_term, block_term, token, ends, partials, **_strides(grad, x, token_term),
            GROUPS=groups, PADDED=power_of_2(groups), **sizes,
        )  # fmt: skip
    return sum_partials(partials, ends, sizes["ROWS"], width)[0]


def _allocate_blocks_backward(grad, x, token_term, block_term, token, ends):
    return x.new_empty(ends.shape[0], x.shape[1], dtype=torch.float32)


def _differentiate(ctx, grad):
    x, token_term, block_term, token, inverse, group, ends = ctx.saved_tensors
    block_grad = None
    if block_term is not None and ctx.needs_input_grad[2]:
        with aside(ctx, grad, x, token_term, token, ends):
            block_grad = _blocks_gradient(grad, x, token_term, block_term, token, ends).to(block_term.dtype)
    x_grad, term_grad = _tokens_gradient(grad, x, token_term, block_term, inverse, group, ends)
    return x_grad, None if token_term is None else term_grad, block_grad, None, None, None, None


_filter_rows = define("filter_rows", schema_of(_allocate), _run, _allocate, differentiate=_differentiate)
_tokens_gradient = define(
    "filter_tokens_backward", schema_of(_allocate_tokens_backward, 2), _run_tokens_backward, _allocate_tokens_backward
)
_blocks_gradient = define(
    "filter_blocks_backward", schema_of(_allocate_blocks_backward), _run_blocks_backward, _allocate_blocks_backward
)
