"""The backward of ``fused_gate.py`` for rows too wide for a program's registers: two kernels, in pieces of columns.

With n, u, z̃ as there, ẑ = LN(z̃) before its gain, a = dy ⊙ LN's gain and c = ∂z̃/∂n = v ⊙ λ SiLU'(u) ⊙ gain:

    dz̃ = (a − mean(a) − ẑ mean(a ẑ)) / deviation
    dv = dz̃ ⊙ (1 + λ SiLU(u)),   dn = dz̃ ⊙ c,   dg = (dn − n mean(dn n)) / rms

mean(dn n) is linear in dz̃, so it follows from three more means: of a c n, c n and ẑ c n. The first kernel passes over
the rows once and computes all five; the second goes over pieces of columns, writes the gradients, and sums over rows.
"""

import triton
import triton.language as tl

from intbmoe.ops.blocks.fused_dprg import gate_factors
from intbmoe.ops.launch import launch
from intbmoe.ops.overlap import begin
from intbmoe.ops.tiles import load_rows, power_below, programs, rows_of_program
from intbmoe.ops.triton_support import ceil_div, power_of_2

# Tried on an H200, with 16 tiles per program; more tiles, which give fewer partial sums, were not tried separately.
ROW_TILE, ROW_BLOCK, ROW_WARPS = 4, 512, 4
TILE, BLOCK, WARPS, TILES = 2, 512, 2, 64
"""Rows and columns at a time, warps, and the number of such tiles per program of the second kernel."""


@triton.jit
def _piece(
    grad, rows, bias, gain, factor, norm_gain, row, live, column, mean, deviation, rms,
    GRAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, GATE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return dy, ẑ, LN's gain, the gate's gain, n and z̃'s derivatives for some columns; zero past the width."""
    inside = column < WIDTH
    mask = live[:, None] & inside[None, :]
    norm = tl.load(norm_gain + column, mask=inside, other=0.0)[None, :]
    dy = load_rows(grad, row, column, GRAD_STRIDE, mask)
    v = load_rows(rows, row, column, ROW_STRIDE, mask) + tl.load(bias + column, mask=inside, other=0.0)[None, :]
    z, gate_gain, n, by_v, by_u, by_scale = v, norm, v, v, v, v
    if GATE:
        gate_gain = tl.load(gain + column, mask=inside, other=0.0)[None, :]
        n = load_rows(rows + WIDTH, row, column, ROW_STRIDE, mask)
        n = (n + tl.load(bias + WIDTH + column, mask=inside, other=0.0)[None, :]) * rms[:, None]
        by_v, by_u, by_scale = gate_factors(v, n, gate_gain, factor)
        z = v * by_v
    z = tl.where(inside[None, :], (z - mean[:, None]) * deviation[:, None], 0.0)
    return dy, z, norm, gate_gain, n, by_v, by_u, by_scale


@triton.jit
def _statistics(statistics, row, live):
    """Return 1/rms of the gate, and LN's mean and 1/deviation, for a tile of rows."""
    number = statistics + row.to(tl.int64) * 3
    rms = tl.load(number, mask=live, other=0.0)
    return rms, tl.load(number + 1, mask=live, other=0.0), tl.load(number + 2, mask=live, other=0.0)


@triton.jit
def _row_means(
    grad, rows, statistics, bias, gain, scale, norm_gain, ends, means,
    GRAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    GATE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store mean(a), mean(a ẑ) and mean(dn n) of every row."""
    begin()
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, TILE)
    if first < end:
        row = first + tl.arange(0, TILE)
        live = row < end
        rms, mean, deviation = _statistics(statistics, row, live)
        factor = 0.0
        if GATE:
            factor = tl.load(scale)
        own_bias = bias + group * (2 if GATE else 1) * WIDTH
        inner = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        along = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        turn = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        turn_inner = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        turn_along = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        for start in tl.range(0, WIDTH, BLOCK, num_stages=2):
            column = start + tl.arange(0, BLOCK)
            dy, z, norm, gate_gain, n, _, by_u, _ = _piece(
                grad, rows, own_bias, gain, factor, norm_gain, row, live, column, mean, deviation, rms,
                GRAD_STRIDE, ROW_STRIDE, GATE, WIDTH,
            )  # fmt: skip
            a = dy * norm
            inner += a
            along += a * z
            if GATE:
                turned = by_u * gate_gain * n
                turn += a * turned
                turn_inner += turned
                turn_along += z * turned
        inner, along = tl.sum(inner, 1) / WIDTH, tl.sum(along, 1) / WIDTH
        place = means + row.to(tl.int64) * 3
        tl.store(place, inner, mask=live)
        tl.store(place + 1, along, mask=live)
        if GATE:
            turn = tl.sum(turn, 1) - inner * tl.sum(turn_inner, 1) - along * tl.sum(turn_along, 1)
            tl.store(place + 2, deviation * turn / WIDTH, mask=live)


@triton.jit
def _columns_backward(
    grad, rows, statistics, means, bias, gain, scale, norm_gain, ends, row_grad, partials,
    GRAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_GRAD_STRIDE: tl.constexpr, PARTIAL_STRIDE: tl.constexpr,
    GATE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the rows' gradient, and this program's sums over rows, for one piece of columns."""
    begin()
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    if first < end:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        factor = 0.0
        if GATE:
            factor = tl.load(scale)
        own_bias = bias + group * (2 if GATE else 1) * WIDTH
        bias_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        gate_bias_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        gain_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        norm_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        shift_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        scale_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        for start in tl.range(0, ROWS, TILE, num_stages=2):
            row = first + start + tl.arange(0, TILE)
            live = row < end
            rms, mean, deviation = _statistics(statistics, row, live)
            inner, along, turn = _statistics(means, row, live)
            dy, z, norm, gate_gain, n, by_v, by_u, by_scale = _piece(
                grad, rows, own_bias, gain, factor, norm_gain, row, live, column, mean, deviation, rms,
                GRAD_STRIDE, ROW_STRIDE, GATE, WIDTH,
            )  # fmt: skip
            shift_sum += dy
            norm_sum += dy * z
            dv = deviation[:, None] * (dy * norm - inner[:, None] - z * along[:, None])
            dv = tl.where(inside[None, :], dv, 0.0)
            place = row_grad + row[:, None].to(tl.int64) * ROW_GRAD_STRIDE + column[None, :]
            mask = live[:, None] & inside[None, :]
            if GATE:
                du = dv * by_u
                gain_sum += du * n
                scale_sum += dv * by_scale
                dv = dv * by_v
                dg = rms[:, None] * (du * gate_gain - n * turn[:, None])
                gate_bias_sum += dg
                tl.store(place + WIDTH, dg.to(row_grad.dtype.element_ty), mask=mask)
            bias_sum += dv
            tl.store(place, dv.to(row_grad.dtype.element_ty), mask=mask)
        partial = partials + tl.program_id(0).to(tl.int64) * PARTIAL_STRIDE
        shared = partial + (2 if GATE else 1) * WIDTH + column
        tl.store(partial + column, tl.sum(bias_sum, 0), mask=inside)
        tl.store(shared, tl.sum(norm_sum, 0), mask=inside)
        tl.store(shared + WIDTH, tl.sum(shift_sum, 0), mask=inside)
        if GATE:
            tl.store(partial + WIDTH + column, tl.sum(gate_bias_sum, 0), mask=inside)
            tl.store(shared + 2 * WIDTH, tl.sum(gain_sum, 0), mask=inside)
            tl.store(partial + 5 * WIDTH + tl.program_id(1), tl.sum(tl.sum(scale_sum, 1), 0))


def scale_columns(width: int) -> int:
    """Return how many partial sums of λ's gradient a program's rows have: one for each piece of columns."""
    return ceil_div(width, BLOCK)


def rows_per_program(count: int) -> int:
    """Return how many rows a program of the second kernel sums over: with few rows, programs are small."""
    return TILE * power_below(count // (TILE * 128), TILES)


def run_backward(grad, rows, statistics, bias, gain, scale, norm_gain, ends, row_grad, partials):
    """Fill ``row_grad`` and ``partials``, the programs' sums, laid out as in ``fused_gate.py``."""
    count, width, groups = rows.shape[0], norm_gain.shape[0], ends.shape[0]
    sizes = {"WIDTH": width, "GROUPS": groups, "PADDED": power_of_2(groups), "GATE": gain is not None}
    sizes |= {"GRAD_STRIDE": grad.stride(0), "ROW_STRIDE": rows.stride(0)}
    parameters = bias, gain, scale, norm_gain, ends
    means = statistics.new_empty(statistics.shape)
    launch(
        _row_means, (programs(count, groups, ROW_TILE),),
        grad, rows, statistics, *parameters, means,
        **sizes, TILE=ROW_TILE, BLOCK=min(ROW_BLOCK, power_of_2(width, 16)), num_warps=ROW_WARPS,
    )  # fmt: skip
    launch(
        _columns_backward, (len(partials), ceil_div(width, BLOCK)),
        grad, rows, statistics, means, *parameters, row_grad, partials,
        **sizes, ROW_GRAD_STRIDE=row_grad.stride(0), PARTIAL_STRIDE=partials.shape[1],
        ROWS=rows_per_program(count), TILE=TILE, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
