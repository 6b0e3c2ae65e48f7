"""The last internal layer of a block and the combine in one Triton kernel each way.

From rows [v | g] of the last grouped GEMM to each token's sum over its k rows (``fused_gate.py`` has the letters):

    y_t = Σ_b π_{t,b} · v ⊙ (1 + λ SiLU(RMSNorm(g))) + S_t            S: the shared expert's output, where there is one

The rows' outputs are never written. Backward recomputes them from [v | g] and one number per row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.blocks.fused_dprg import gate_factors, inverse_rms, rms_gradient
from intbmoe.ops.blocks.naive import RMS_EPS
from intbmoe.ops.branches import aside
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.permute import Permutation
from intbmoe.ops.tiles import Tiling, load_rows, programs, rows_of_program, sigmoid, sum_partials, tiling_for
from intbmoe.ops.triton_support import ceil_div, empty_rows, in_rows, power_of_2

FORWARD = Tiling(elements=512, per_lane=8)
BACKWARD = {
    512: Tiling(elements=256, per_lane=8, tiles=64, stages=3),
    None: Tiling(elements=512, per_lane=16, tiles=32, stages=3),
}


def gated_combine(
    rows: Tensor,
    bias: Tensor,
    gain: Tensor | None,
    scale: Tensor | None,
    weights: Tensor,
    shared: Tensor | None,
    plan: Permutation,
    dtype: torch.dtype,
) -> Tensor:
    """(M, P·o) rows sorted by group, (N, k) weights, (N, o) ``shared`` → (N, o) in ``dtype``.

    A choice without a group adds nothing.
    """
    return _gated_combine(rows, bias, gain, scale, weights, shared, *plan[:5], plan.complete, dtype)[0]


@triton.jit
def _gated_combine_forward(
    rows, bias, gain, scale, weights, shared, inverse, group, ends, out, statistics, tokens,
    ROW_STRIDE: tl.constexpr, SHARED_STRIDE: tl.constexpr, GATE: tl.constexpr, WIDTH: tl.constexpr,
    CHOICES: tl.constexpr, GROUPS: tl.constexpr, RMS_EPS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    paths = 2 if GATE else 1
    count = tl.load(ends + GROUPS - 1)
    there = (token < tokens)[:, None] & inside[None, :]
    place = token[:, None] * WIDTH + column[None, :]
    if shared is not None:
        total = load_rows(shared, token, column, SHARED_STRIDE, there)
    else:
        total = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    if GATE:
        gate_gain = tl.load(gain + column, mask=inside, other=0.0)[None, :]
        factor = tl.load(scale)
    places, roots = (), ()
    for number in tl.static_range(CHOICES):
        own = token * CHOICES + number
        row = tl.load(inverse + own, mask=token < tokens, other=count)
        live = row < count
        weight = tl.load(weights + own, mask=live, other=0.0)
        mask = live[:, None] & inside[None, :]
        own_bias = tl.load(group + row, mask=live, other=0) * paths * WIDTH
        z = load_rows(rows, row, column, ROW_STRIDE, mask)
        z += tl.load(bias + own_bias[:, None] + column[None, :], mask=mask, other=0.0)
        if GATE:
            g = load_rows(rows + WIDTH, row, column, ROW_STRIDE, mask)
            g += tl.load(bias + WIDTH + own_bias[:, None] + column[None, :], mask=mask, other=0.0)
            rms = inverse_rms(g, WIDTH, RMS_EPS)
            u = g * rms[:, None] * gate_gain
            z = z * (1 + factor * u * sigmoid(u))
            places += (row,)
            roots += (rms,)
        total += weight[:, None] * z
    if GATE:
        for number in tl.static_range(CHOICES):  # after all loads, because no load is moved ahead of a store
            tl.store(statistics + places[number], roots[number], mask=places[number] < count)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _gated_combine_backward(
    grad, rows, statistics, bias, gain, scale, weights, token, choice, ends, row_grad, weight_grad, shared_grad,
    partials,
    GRAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_GRAD_STRIDE: tl.constexpr,
    GATE: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    if first < end:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        paths = 2 if GATE else 1
        own_bias = bias + group * paths * WIDTH + column
        value_bias = tl.load(own_bias, mask=inside, other=0.0)[None, :]
        if GATE:
            gate_bias = tl.load(own_bias + WIDTH, mask=inside, other=0.0)[None, :]
            gate_gain = tl.load(gain + column, mask=inside, other=0.0)[None, :]
            factor = tl.load(scale)
        bias_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        gate_bias_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        gain_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        scale_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        for start in tl.range(0, ROWS, TILE, num_stages=STAGES):
            row = first + start + tl.arange(0, TILE)
            live = row < end
            mask = live[:, None] & inside[None, :]
            own = tl.load(choice + row, mask=live, other=0)
            weight = tl.load(weights + own, mask=live, other=0.0)
            own_token = tl.load(token + row, mask=live, other=0)
            dy = load_rows(grad, own_token, column, GRAD_STRIDE, mask)
            v = load_rows(rows, row, column, ROW_STRIDE, mask) + value_bias
            z = v
            dz = weight[:, None] * dy
            place = row[:, None].to(tl.int64) * ROW_GRAD_STRIDE + column[None, :]
            if GATE:
                rms = tl.load(statistics + row, mask=live, other=0.0)
                n = (load_rows(rows + WIDTH, row, column, ROW_STRIDE, mask) + gate_bias) * rms[:, None]
                by_v, by_u, by_scale = gate_factors(v, n, gate_gain, factor)
                z = v * by_v
                dv, du = dz * by_v, dz * by_u
                dg = rms_gradient(du * gate_gain, n, rms, WIDTH)
                tl.store(row_grad + place + WIDTH, dg.to(row_grad.dtype.element_ty), mask=mask)
                gate_bias_sum += dg
                gain_sum += du * n
                scale_sum += dz * by_scale
            else:
                dv = dz
            tl.store(weight_grad + own, tl.sum(dy * z, 1), mask=live)
            tl.store(row_grad + place, dv.to(row_grad.dtype.element_ty), mask=mask)
            if shared_grad is not None:  # the row of a token's first choice casts the shared expert's gradient
                cast = shared_grad + own_token[:, None] * WIDTH + column[None, :]
                tl.store(cast, dy.to(shared_grad.dtype.element_ty), mask=mask & (own % CHOICES == 0)[:, None])
            bias_sum += dv
        if GATE:
            partial = partials + tl.program_id(0).to(tl.int64) * (3 * WIDTH + 1)
            tl.store(partial + WIDTH + column, tl.sum(gate_bias_sum, 0), mask=inside)
            tl.store(partial + 2 * WIDTH + column, tl.sum(gain_sum, 0), mask=inside)
            tl.store(partial + 3 * WIDTH, tl.sum(tl.sum(scale_sum, 1), 0))
        else:
            partial = partials + tl.program_id(0).to(tl.int64) * WIDTH
        tl.store(partial + column, tl.sum(bias_sum, 0), mask=inside)


def _run(rows, bias, gain, scale, weights, shared, token, choice, inverse, group, ends, complete, dtype):
    tokens, choices = inverse.shape
    inputs = rows, bias, gain, scale, weights, shared, token, choice, inverse, group, ends, complete, dtype
    out, statistics = _allocate(*inputs)
    width = out.shape[1]
    rows, weights, shared = in_rows(rows), weights.contiguous(), None if shared is None else in_rows(shared)
    sizes = FORWARD.tile(width)
    if tokens:
        launch(
            _gated_combine_forward, (ceil_div(tokens, sizes["TILE"]),),
            rows, bias, gain, scale, weights, shared, inverse, group, ends, out, statistics,
            tokens, ROW_STRIDE=rows.stride(0), SHARED_STRIDE=0 if shared is None else shared.stride(0), WIDTH=width,
            GATE=gain is not None, CHOICES=choices, GROUPS=ends.shape[0], RMS_EPS=RMS_EPS, **sizes,
        )  # fmt: skip
    return out, statistics


def _allocate(
    rows, bias, gain, scale, weights, shared, token, choice, inverse, group, ends, complete: bool, dtype: torch.dtype
):
    width = rows.shape[1] if gain is None else rows.shape[1] // 2
    out = rows.new_empty(inverse.shape[0], width, dtype=dtype)
    return out, rows.new_empty(rows.shape[0], dtype=torch.float32)


def _rows_per_program(width: int, count: int) -> int:
    return tiling_for(width, BACKWARD).chunk(width, count)["ROWS"]


def _run_backward(grad, rows, statistics, bias, gain, scale, weights, token, choice, ends, complete, casts, dtype):
    count, groups = rows.shape[0], ends.shape[0]
    row_grad, weight_grad, partials, shared_grad = _allocate_backward(
        grad, rows, statistics, bias, gain, scale, weights, token, choice, ends, complete, casts, dtype
    )
    if not complete:
        weight_grad.zero_()  # for choices without a group
    if count == 0:
        return row_grad, weight_grad, partials, shared_grad
    width = grad.shape[1]
    sizes = tiling_for(width, BACKWARD).chunk(width, count)
    grad, rows, weights = in_rows(grad), in_rows(rows), weights.contiguous()
    launch(
        _gated_combine_backward, (len(partials),),
        grad, rows, statistics, bias, gain, scale, weights, token, choice, ends, row_grad, weight_grad,
        shared_grad if casts else None, partials,
        GRAD_STRIDE=grad.stride(0), ROW_STRIDE=rows.stride(0), ROW_GRAD_STRIDE=row_grad.stride(0), WIDTH=width,
        GATE=gain is not None, CHOICES=weights.shape[1], GROUPS=groups, PADDED=power_of_2(groups), **sizes,
    )  # fmt: skip
    return row_grad, weight_grad, partials, shared_grad


def _allocate_backward(
    grad, rows, statistics, bias, gain, scale, weights, token, choice, ends,
    complete: bool, casts: bool, dtype: torch.dtype,
):  # fmt: skip
    """``casts``: whether to write the gradient in ``dtype`` too, the type of the shared expert's output."""
    columns = rows.shape[1] if gain is None else rows.shape[1] + gain.shape[0] + 1
    number = programs(rows.shape[0], ends.shape[0], _rows_per_program(grad.shape[1], rows.shape[0]))
    partials = rows.new_empty(number, columns, dtype=torch.float32)
    shared_grad = grad.new_empty(grad.shape[0] if casts else 0, grad.shape[1], dtype=dtype)
    return empty_rows(rows, *rows.shape), weights.new_empty(weights.shape), partials, shared_grad


def _save(ctx, inputs, output):
    rows, bias, gain, scale, weights, shared, token, choice, _, _, ends, ctx.complete, _ = inputs
    ctx.shared = None if shared is None else shared.dtype
    ctx.save_for_backward(rows, output[1], bias, gain, scale, weights, token, choice, ends)


def _differentiate(ctx, grad, _):
    saved = ctx.saved_tensors  # read only once, as checkpointing requires
    gain = saved[3]
    # Unless every choice has a row, some token may have no row that would cast its gradient.
    casts = ctx.complete and ctx.shared not in (None, grad.dtype)
    row_grad, weight_grad, partials, shared_grad = _combine_gradient(
        grad, *saved, ctx.complete, casts, ctx.shared or grad.dtype
    )
    bias_grad = gain_grad = scale_grad = None
    if any(ctx.needs_input_grad[1:4]):
        columns, ends = row_grad.shape[1], saved[-1]
        with aside(ctx, partials, ends):
            rows_each = _rows_per_program(grad.shape[1], row_grad.shape[0])
            bias_grad, totals = sum_partials(partials, ends, rows_each, columns)
            if gain is not None:
                gain_grad, scale_grad = totals[:-1], totals[-1:]
    if not casts:
        shared_grad = None if ctx.shared is None else grad.to(ctx.shared)
    plan = (None,) * 7
    return row_grad, bias_grad, gain_grad, scale_grad, weight_grad, shared_grad, *plan


_gated_combine = define("gated_combine", schema_of(_allocate, 2), _run, _allocate, _save, _differentiate)
_combine_gradient = define(
    "gated_combine_backward", schema_of(_allocate_backward, 4), _run_backward, _allocate_backward
)
