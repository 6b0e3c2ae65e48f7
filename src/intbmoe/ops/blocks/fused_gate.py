"""A block's row operation between two matrix products, in one Triton kernel each for forward and backward.

From rows [v | g] of the grouped GEMM, sorted by group, to the next product's input:

    v ← v + b_v,  g ← g + b_g,  n = g / rms(g),  u = n ⊙ gain,  z̃ = v ⊙ (1 + λ SiLU(u)),  z = LN(z̃)

Forward keeps [v | g], which the GEMM has written anyway, and per row 1/rms and LN's mean and 1/deviation.
Backward reads the rows again, recomputes the rest, and sums the gradients of biases, gains and λ in a fixed order.
Arithmetic is in float32. Without a gate (no ``gain``), rows are v alone and z = LN(v + b_v).

The sizes of Triton's tensors are powers of two: a row of 2844 would take 4096 lanes. So a row may be cut into pieces,
here 3 of 1024, each a separate tensor in a tuple.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.blocks import fused_gate_wide
from intbmoe.ops.blocks.fused_dprg import gate_factors
from intbmoe.ops.blocks.naive import RMS_EPS
from intbmoe.ops.branches import aside
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.tiles import Tiling, programs, rows_of_program, sigmoid, sum_partials, tiling_for
from intbmoe.ops.triton_support import empty_rows, in_rows, power_of_2

# Measured on an H200 at widths from 256 to 2844.
FORWARD = {
    1024: Tiling(elements=512, per_lane=24, tiles=16, stages=3, pieces=(1, 3), spread=2),
    None: Tiling(elements=512, per_lane=12, tiles=16, stages=3, pieces=(1, 3), spread=2),
}
BACKWARD = {
    512: Tiling(elements=256, per_lane=8, tiles=32, stages=3),
    1024: Tiling(elements=1024, per_lane=12, tiles=64, stages=4, pieces=(1, 3)),
    None: Tiling(elements=1024, per_lane=12, tiles=64, stages=3, pieces=(1, 3)),
}
FEW_ROWS = 8192
BACKWARD_FEW = BACKWARD | {1024: Tiling(elements=1024, per_lane=6, tiles=64, stages=3, pieces=(1, 3))}
"""For fewer rows than that: twice as many warps for each."""
WIDE = 3072
"""Above this many columns, backward uses ``fused_gate_wide.py``: a program cannot hold wider rows in registers."""


def gated_rows(
    rows: Tensor,
    bias: Tensor,
    gain: Tensor | None,
    scale: Tensor | None,
    norm: tuple[Tensor, Tensor],
    ends: Tensor,
    norm_eps: float,
) -> Tensor:
    """(M, P·o) rows sorted by group, (G, P·o) biases, (o,) gains, (1,) λ → (M, o), unset after the last group."""
    return _gated_rows(rows, bias, gain, scale, *norm, ends, norm_eps)[0]


@triton.jit
def _columns(piece, BLOCK: tl.constexpr):
    return piece * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _load_vector(base, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """(WIDTH,) numbers as pieces (1, BLOCK), zero past the width."""
    parts = ()
    for piece in tl.static_range(PIECES):
        column = _columns(piece, BLOCK)
        parts += (tl.load(base + column, mask=column < WIDTH, other=0.0)[None, :],)
    return parts


@triton.jit
def _load_pieces(base, row, live, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """A tile of rows as pieces (TILE, BLOCK), in the rows' own type: half as many registers until they are used."""
    parts = ()
    for piece in tl.static_range(PIECES):
        column = _columns(piece, BLOCK)
        place = row[:, None].to(tl.int64) * STRIDE + column[None, :]
        parts += (tl.load(base + place, mask=live[:, None] & (column < WIDTH)[None, :], other=0.0),)
    return parts


@triton.jit
def _store_pieces(
    base, parts, row, live, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr
):
    for piece in tl.static_range(PIECES):
        column = _columns(piece, BLOCK)
        place = row[:, None].to(tl.int64) * STRIDE + column[None, :]
        mask = live[:, None] & (column < WIDTH)[None, :]
        tl.store(base + place, parts[piece].to(base.dtype.element_ty), mask=mask)


@triton.jit
def _zeros(TILE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    parts = ()
    for _ in tl.static_range(PIECES):
        parts += (tl.zeros([TILE, BLOCK], dtype=tl.float32),)
    return parts


@triton.jit
def _store_sums(base, parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Store the sums over the rows of a tile."""
    for piece in tl.static_range(PIECES):
        column = _columns(piece, BLOCK)
        tl.store(base + column, tl.sum(parts[piece], 0), mask=column < WIDTH)


@triton.jit
def _inside(x, piece, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``x`` with zeros past the width."""
    if (piece + 1) * BLOCK > WIDTH:
        x = tl.where((_columns(piece, BLOCK) < WIDTH)[None, :], x, 0.0)
    return x


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _gated_rows_forward(
    rows, bias, gain, scale, norm_gain, norm_shift, ends, out, statistics, norm_eps,
    ROW_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, GATE: tl.constexpr, WIDTH: tl.constexpr, RMS_EPS: tl.constexpr,
    GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    begin()
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    if first < end:
        paths = 2 if GATE else 1
        own_bias = bias + group * paths * WIDTH
        value_bias = _load_vector(own_bias, WIDTH, BLOCK, PIECES)
        norm = _load_vector(norm_gain, WIDTH, BLOCK, PIECES)
        shift = _load_vector(norm_shift, WIDTH, BLOCK, PIECES)
        if GATE:
            gate_bias = _load_vector(own_bias + WIDTH, WIDTH, BLOCK, PIECES)
            gate_gain = _load_vector(gain, WIDTH, BLOCK, PIECES)
            factor = tl.load(scale)
        for start in tl.range(0, ROWS, TILE, num_stages=STAGES):
            row = first + start + tl.arange(0, TILE)
            live = row < end
            number = row.to(tl.int64) * 3
            values = _load_pieces(rows, row, live, ROW_STRIDE, WIDTH, BLOCK, PIECES)
            if GATE:
                gates = _load_pieces(rows + WIDTH, row, live, ROW_STRIDE, WIDTH, BLOCK, PIECES)
            total = tl.zeros([TILE, BLOCK], dtype=tl.float32)
            square = tl.zeros([TILE, BLOCK], dtype=tl.float32)
            for piece in tl.static_range(PIECES):
                total += values[piece].to(tl.float32) + value_bias[piece]
                if GATE:
                    g = gates[piece].to(tl.float32) + gate_bias[piece]
                    square += g * g
            near, square = tl.reduce((total / WIDTH, square / WIDTH), 1, _add_pairs)
            rms = 1 / tl.sqrt(square + RMS_EPS)
            # LN's mean and variance are computed together, relative to the mean of v, so that no precision is lost
            # when numbers are far from zero.
            away = ()
            total = tl.zeros([TILE, BLOCK], dtype=tl.float32)
            square = tl.zeros([TILE, BLOCK], dtype=tl.float32)
            for piece in tl.static_range(PIECES):
                part = values[piece].to(tl.float32) + value_bias[piece]
                if GATE:
                    u = (gates[piece].to(tl.float32) + gate_bias[piece]) * rms[:, None] * gate_gain[piece]
                    part = part * (1 + factor * u * sigmoid(u))
                part = _inside(part - near[:, None], piece, WIDTH, BLOCK)
                total += part
                square += part * part
                away += (part,)
            mean, square = tl.reduce((total / WIDTH, square / WIDTH), 1, _add_pairs)
            deviation = 1 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + norm_eps)
            result = ()
            for piece in tl.static_range(PIECES):
                unit = away[piece] * deviation[:, None] - (mean * deviation)[:, None]
                result += (unit * norm[piece] + shift[piece],)
            _store_pieces(out, result, row, live, OUT_STRIDE, WIDTH, BLOCK, PIECES)
            if GATE:
                tl.store(statistics + number, rms, mask=live)
            tl.store(statistics + number + 1, near + mean, mask=live)
            tl.store(statistics + number + 2, deviation, mask=live)


@triton.jit
def _gated_rows_backward(
    grad, rows, statistics, bias, gain, scale, norm_gain, ends, row_grad, partials,
    GRAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_GRAD_STRIDE: tl.constexpr,
    GATE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    begin()
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    if first < end:
        paths = 2 if GATE else 1
        own_bias = bias + group * paths * WIDTH
        value_bias = _load_vector(own_bias, WIDTH, BLOCK, PIECES)
        norm = _load_vector(norm_gain, WIDTH, BLOCK, PIECES)
        if GATE:
            gate_bias = _load_vector(own_bias + WIDTH, WIDTH, BLOCK, PIECES)
            gate_gain = _load_vector(gain, WIDTH, BLOCK, PIECES)
            factor = tl.load(scale)
        bias_sum = _zeros(TILE, BLOCK, PIECES)
        gate_bias_sum = _zeros(TILE, BLOCK, PIECES)
        gain_sum = _zeros(TILE, BLOCK, PIECES)
        norm_sum = _zeros(TILE, BLOCK, PIECES)
        shift_sum = _zeros(TILE, BLOCK, PIECES)
        scale_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        for start in tl.range(0, ROWS, TILE, num_stages=STAGES):
            row = first + start + tl.arange(0, TILE)
            live = row < end
            number = row.to(tl.int64) * 3
            grads = _load_pieces(grad, row, live, GRAD_STRIDE, WIDTH, BLOCK, PIECES)
            values = _load_pieces(rows, row, live, ROW_STRIDE, WIDTH, BLOCK, PIECES)
            mean = tl.load(statistics + number + 1, mask=live, other=0.0)
            deviation = tl.load(statistics + number + 2, mask=live, other=0.0)
            if GATE:
                gates = _load_pieces(rows + WIDTH, row, live, ROW_STRIDE, WIDTH, BLOCK, PIECES)
                rms = tl.load(statistics + number, mask=live, other=0.0)
            n, z, norm_next, shift_next = (), (), (), ()
            by_v, by_u, by_scale = (), (), ()
            inner = tl.zeros([TILE, BLOCK], dtype=tl.float32)
            along = tl.zeros([TILE, BLOCK], dtype=tl.float32)
            for piece in tl.static_range(PIECES):
                value = values[piece].to(tl.float32) + value_bias[piece]
                if GATE:
                    unit = (gates[piece].to(tl.float32) + gate_bias[piece]) * rms[:, None]
                    opened, by_gate, by_factor = gate_factors(value, unit, gate_gain[piece], factor)
                    value = value * opened
                    n += (unit,)
                    by_v += (opened,)
                    by_u += (by_gate,)
                    by_scale += (by_factor,)
                normal = value * deviation[:, None] - (mean * deviation)[:, None]  # LN before its gain
                z += (normal,)
                dy = grads[piece].to(tl.float32)  # zero past the width and the end, and so are its multiples
                norm_next += (norm_sum[piece] + dy * normal,)
                shift_next += (shift_sum[piece] + dy,)
                dy = dy * norm[piece]
                inner += dy
                along += dy * normal
            norm_sum, shift_sum = norm_next, shift_next
            inner, along = tl.reduce((inner / WIDTH, along / WIDTH), 1, _add_pairs)
            inner, along = inner * deviation, along * deviation
            dv, dn, bias_next, gain_next = (), (), (), ()
            turn = tl.zeros([TILE, BLOCK], dtype=tl.float32)
            for piece in tl.static_range(PIECES):
                dz = grads[piece].to(tl.float32) * norm[piece] * deviation[:, None] - inner[:, None]
                dz = dz - z[piece] * along[:, None]  # not zero past the width, but nothing is stored there
                if GATE:
                    du = dz * by_u[piece]
                    gain_next += (gain_sum[piece] + du * n[piece],)
                    scale_sum += dz * by_scale[piece]
                    dz = dz * by_v[piece]
                    dunit = du * gate_gain[piece]
                    turn += dunit * n[piece]
                    dn += (dunit,)
                dv += (dz,)
                bias_next += (bias_sum[piece] + dz,)
            bias_sum = bias_next
            _store_pieces(row_grad, dv, row, live, ROW_GRAD_STRIDE, WIDTH, BLOCK, PIECES)
            if GATE:
                gain_sum = gain_next
                turn = rms * tl.sum(turn, 1) / WIDTH
                dg, gate_bias_next = (), ()
                for piece in tl.static_range(PIECES):
                    part = rms[:, None] * dn[piece] - n[piece] * turn[:, None]
                    dg += (part,)
                    gate_bias_next += (gate_bias_sum[piece] + part,)
                gate_bias_sum = gate_bias_next
                _store_pieces(row_grad + WIDTH, dg, row, live, ROW_GRAD_STRIDE, WIDTH, BLOCK, PIECES)
        partial = partials + tl.program_id(0).to(tl.int64) * (5 * WIDTH + 1 if GATE else 3 * WIDTH)
        _store_sums(partial, bias_sum, WIDTH, BLOCK, PIECES)
        if GATE:
            _store_sums(partial + WIDTH, gate_bias_sum, WIDTH, BLOCK, PIECES)
            _store_sums(partial + 4 * WIDTH, gain_sum, WIDTH, BLOCK, PIECES)
            tl.store(partial + 5 * WIDTH, tl.sum(tl.sum(scale_sum, 1), 0))
        _store_sums(partial + paths * WIDTH, norm_sum, WIDTH, BLOCK, PIECES)
        _store_sums(partial + (paths + 1) * WIDTH, shift_sum, WIDTH, BLOCK, PIECES)


def _sizes(tilings: dict[int | None, Tiling], width: int, count: int) -> dict[str, int]:
    tiling = tiling_for(width, tilings)
    return {**tiling.chunk(width, count), "PIECES": tiling.cut(width)}


def _backward_sizes(width: int, count: int) -> dict[str, int]:
    return _sizes(BACKWARD_FEW if count < FEW_ROWS else BACKWARD, width, count)


def _run(rows, bias, gain, scale, norm_gain, norm_shift, ends, norm_eps):
    count, width, groups = rows.shape[0], norm_gain.shape[0], ends.shape[0]
    out, statistics = _allocate(rows, bias, gain, scale, norm_gain, norm_shift, ends, norm_eps)
    rows = in_rows(rows)
    sizes = _sizes(FORWARD, width, count)
    if count:
        launch(
            _gated_rows_forward, (programs(count, groups, sizes["ROWS"]),),
            rows, bias, gain, scale, norm_gain, norm_shift, ends, out, statistics, norm_eps,
            ROW_STRIDE=rows.stride(0), OUT_STRIDE=out.stride(0), WIDTH=width,
            GATE=gain is not None, RMS_EPS=RMS_EPS, GROUPS=groups, PADDED=power_of_2(groups), **sizes,
        )  # fmt: skip
    return out, statistics


def _allocate(rows, bias, gain, scale, norm_gain, norm_shift, ends, norm_eps: float):
    out = empty_rows(rows, rows.shape[0], norm_gain.shape[0])
    return out, rows.new_empty(rows.shape[0], 3, dtype=torch.float32)


def _rows_per_program(width: int, count: int) -> int:
    return fused_gate_wide.rows_per_program(count) if width > WIDE else _backward_sizes(width, count)["ROWS"]


def _run_backward(grad, rows, statistics, bias, gain, scale, norm_gain, ends):
    count, width, groups = rows.shape[0], norm_gain.shape[0], ends.shape[0]
    row_grad, partials = _allocate_backward(grad, rows, statistics, bias, gain, scale, norm_gain, ends)
    if count == 0:
        return row_grad, partials
    grad, rows = in_rows(grad), in_rows(rows)
    if width > WIDE:
        parameters = bias, gain, scale, norm_gain, ends
        fused_gate_wide.run_backward(grad, rows, statistics, *parameters, row_grad, partials)
        return row_grad, partials
    sizes = _backward_sizes(width, count)
    launch(
        _gated_rows_backward, (len(partials),),
        grad, rows, statistics, bias, gain, scale, norm_gain, ends, row_grad, partials,
        GRAD_STRIDE=grad.stride(0), ROW_STRIDE=rows.stride(0), ROW_GRAD_STRIDE=row_grad.stride(0), WIDTH=width,
        GATE=gain is not None, GROUPS=groups, PADDED=power_of_2(groups), **sizes,
    )  # fmt: skip
    return row_grad, partials


def _allocate_backward(grad, rows, statistics, bias, gain, scale, norm_gain, ends):
    width = norm_gain.shape[0]
    scales = fused_gate_wide.scale_columns(width) if width > WIDE else 1
    columns = 3 * width if gain is None else 5 * width + scales
    number = programs(rows.shape[0], ends.shape[0], _rows_per_program(width, rows.shape[0]))
    return empty_rows(rows, *rows.shape), rows.new_empty(number, columns, dtype=torch.float32)


def _save(ctx, inputs, output):
    rows, bias, gain, scale, norm_gain, _, ends, _ = inputs
    ctx.save_for_backward(rows, output[1], bias, gain, scale, norm_gain, ends)


def _differentiate(ctx, grad, _):
    rows, statistics, bias, gain, scale, norm_gain, ends = ctx.saved_tensors
    row_grad, partials = _rows_gradient(grad, rows, statistics, bias, gain, scale, norm_gain, ends)
    if not any(ctx.needs_input_grad[1:6]):
        return row_grad, *(None,) * 7
    width, paths = norm_gain.shape[0], 1 if gain is None else 2
    gain_grad = scale_grad = None
    with aside(ctx, partials, ends):
        rows_each = _rows_per_program(width, rows.shape[0])
        bias_grad, totals = sum_partials(partials, ends, rows_each, paths * width)
        if gain is not None:
            gain_grad, scale_grad = totals[2 * width : 3 * width], totals[3 * width :]
            scale_grad = scale_grad if scale_grad.shape[0] == 1 else scale_grad.sum(0, keepdim=True)
    return row_grad, bias_grad, gain_grad, scale_grad, totals[:width], totals[width : 2 * width], None, None


_gated_rows = define("gated_rows", schema_of(_allocate, 2), _run, _allocate, _save, _differentiate)
_rows_gradient = define("gated_rows_backward", schema_of(_allocate_backward, 2), _run_backward, _allocate_backward)
