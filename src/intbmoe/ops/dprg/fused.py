"""The row operation of a block between two matrix products, in one Triton kernel each way.

From rows [v | g] of the grouped GEMM, sorted by group, to the next product's input:

    v ← v + b_v,  g ← g + b_g,  n = g / rms(g),  u = n ⊙ gain,  z̃ = v ⊙ (1 + λ SiLU(u)),  z = LN(z̃)

Forward keeps [v | g], which the GEMM has written anyway, and three numbers a row: 1/rms, and LN's mean and 1/deviation.
Backward reads the rows once more, recomputes the rest, and sums the gradients of biases, gains and λ in a fixed order.
Arithmetic is in float32. Without a gate (no ``gain``) rows are v alone and z = LN(v + b_v).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.dprg.naive import RMS_EPS
from intbmoe.ops.tiles import Tiling, programs, rows_of_program, sum_partials
from intbmoe.ops.triton_support import differentiable_once, empty_rows, in_rows, on_device, power_of_2

STATISTICS = 3
# Measured on an H200 at the paper's three widths (benchmarks/gpu.py).
FORWARD = Tiling(elements=1024, per_lane=32, tiles=16, stages=3)
BACKWARD = {
    512: Tiling(elements=512, per_lane=16, tiles=16, stages=3),
    1024: Tiling(elements=1024, per_lane=8, tiles=32, stages=3),
    None: Tiling(elements=1024, per_lane=16, tiles=32, stages=2),
}
"""By the widest rows that each is for: a narrow row fits into one warp, which need not wait for others; of a very wide
one each lane holds more, lest too many warps wait for each other."""

torch.library.define(
    "intbmoe::gated_rows",
    "(Tensor rows, Tensor bias, Tensor? gain, Tensor? scale, Tensor norm_gain, Tensor norm_shift, Tensor ends, "
    "float norm_eps) -> (Tensor, Tensor)",
)
torch.library.define(
    "intbmoe::gated_rows_backward",
    "(Tensor grad, Tensor rows, Tensor statistics, Tensor bias, Tensor? gain, Tensor? scale, Tensor norm_gain, "
    "Tensor ends) -> (Tensor, Tensor)",
)


def gated_rows(
    rows: Tensor,
    bias: Tensor,
    gain: Tensor | None,
    scale: Tensor | None,
    norm: tuple[Tensor, Tensor],
    ends: Tensor,
    norm_eps: float,
) -> Tensor:
    """(M, P·o) rows sorted by group, (G, P·o) biases, (o,) gains, (1,) λ → (M, o) in the type of ``rows``.

    Rows after the last group are left uninitialised.
    """
    return torch.ops.intbmoe.gated_rows(rows, bias, gain, scale, *norm, ends, norm_eps)[0]


@triton.jit
def load_rows(base, row, column, stride, mask):
    """A tile of rows in float32."""
    place = row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(base + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def inverse_rms(g, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean(g²) + ε) of each row; columns past the width must be zero."""
    return 1 / tl.sqrt(tl.sum(g * g, 1) / WIDTH + EPS)


@triton.jit
def gate_gradients(dz, v, n, gain, scale):
    """From dz̃: dv, dn before RMSNorm's own, and the addends of the gradients of gain and λ."""
    u = n * gain
    sigmoid = tl.sigmoid(u)
    silu = u * sigmoid
    dv = dz * (1 + scale * silu)
    du = dz * v * scale * sigmoid * (1 + u * (1 - sigmoid))
    return dv, du * gain, du * n, dz * v * silu


@triton.jit
def rms_gradient(dn, n, rms, WIDTH: tl.constexpr):
    """Through n = g / rms(g)."""
    return rms[:, None] * (dn - n * (tl.sum(dn * n, 1) / WIDTH)[:, None])


@triton.jit
def _gated_rows_forward(
    rows, bias, gain, scale, norm_gain, norm_shift, ends, out, statistics, norm_eps,
    ROW_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, GATE: tl.constexpr, WIDTH: tl.constexpr, RMS_EPS: tl.constexpr,
    GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    if first < end:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        paths = 2 if GATE else 1
        own_bias = bias + group * paths * WIDTH + column
        value_bias = tl.load(own_bias, mask=inside, other=0.0)[None, :]
        shift = tl.load(norm_shift + column, mask=inside, other=0.0)[None, :]
        norm = tl.load(norm_gain + column, mask=inside, other=0.0)[None, :]
        if GATE:
            gate_bias = tl.load(own_bias + WIDTH, mask=inside, other=0.0)[None, :]
            gate_gain = tl.load(gain + column, mask=inside, other=0.0)[None, :]
            factor = tl.load(scale)
        for start in tl.range(0, ROWS, TILE, num_stages=STAGES):
            row = first + start + tl.arange(0, TILE)
            mask = (row < end)[:, None] & inside[None, :]
            z = load_rows(rows, row, column, ROW_STRIDE, mask) + value_bias
            number = row.to(tl.int64) * 3
            if GATE:
                g = load_rows(rows + WIDTH, row, column, ROW_STRIDE, mask) + gate_bias
                rms = inverse_rms(g, WIDTH, RMS_EPS)
                u = g * rms[:, None] * gate_gain
                z = z * (1 + factor * u * tl.sigmoid(u))
                tl.store(statistics + number, rms, mask=row < end)
            mean = tl.sum(z, 1) / WIDTH
            z = tl.where(inside[None, :], z - mean[:, None], 0.0)
            deviation = 1 / tl.sqrt(tl.sum(z * z, 1) / WIDTH + norm_eps)
            tl.store(statistics + number + 1, mean, mask=row < end)
            tl.store(statistics + number + 2, deviation, mask=row < end)
            z = z * deviation[:, None] * norm + shift
            place = row[:, None].to(tl.int64) * OUT_STRIDE + column[None, :]
            tl.store(out + place, z.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated_rows_backward(
    grad, rows, statistics, bias, gain, scale, norm_gain, ends, row_grad, partials,
    GRAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_GRAD_STRIDE: tl.constexpr,
    GATE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, first, end = rows_of_program(tl.program_id(0), ends, GROUPS, PADDED, ROWS)
    if first < end:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        paths = 2 if GATE else 1
        own_bias = bias + group * paths * WIDTH + column
        value_bias = tl.load(own_bias, mask=inside, other=0.0)[None, :]
        norm = tl.load(norm_gain + column, mask=inside, other=0.0)[None, :]
        if GATE:
            gate_bias = tl.load(own_bias + WIDTH, mask=inside, other=0.0)[None, :]
            gate_gain = tl.load(gain + column, mask=inside, other=0.0)[None, :]
            factor = tl.load(scale)
        bias_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        gate_bias_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        gain_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        norm_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        shift_sum = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        scale_sum = tl.zeros([TILE], dtype=tl.float32)
        for start in tl.range(0, ROWS, TILE, num_stages=STAGES):
            row = first + start + tl.arange(0, TILE)
            live = row < end
            mask = live[:, None] & inside[None, :]
            dz = load_rows(grad, row, column, GRAD_STRIDE, mask)
            v = load_rows(rows, row, column, ROW_STRIDE, mask) + value_bias
            number = row.to(tl.int64) * 3
            mean = tl.load(statistics + number + 1, mask=live, other=0.0)
            deviation = tl.load(statistics + number + 2, mask=live, other=0.0)
            z = v
            if GATE:
                rms = tl.load(statistics + number, mask=live, other=0.0)
                n = (load_rows(rows + WIDTH, row, column, ROW_STRIDE, mask) + gate_bias) * rms[:, None]
                u = n * gate_gain
                z = v * (1 + factor * u * tl.sigmoid(u))
            z = tl.where(inside[None, :], (z - mean[:, None]) * deviation[:, None], 0.0)  # LN before its gain
            norm_sum += dz * z
            shift_sum += dz
            dz = dz * norm
            inner = tl.sum(dz, 1) / WIDTH
            along = tl.sum(dz * z, 1) / WIDTH
            dz = deviation[:, None] * (dz - inner[:, None] - z * along[:, None])
            dz = tl.where(mask, dz, 0.0)
            place = row[:, None].to(tl.int64) * ROW_GRAD_STRIDE + column[None, :]
            if GATE:
                dv, dn, dgain, dscale = gate_gradients(dz, v, n, gate_gain, factor)
                dg = rms_gradient(dn, n, rms, WIDTH)
                tl.store(row_grad + place + WIDTH, dg.to(row_grad.dtype.element_ty), mask=mask)
                gate_bias_sum += dg
                gain_sum += dgain
                scale_sum += tl.sum(dscale, 1)
            else:
                dv = dz
            tl.store(row_grad + place, dv.to(row_grad.dtype.element_ty), mask=mask)
            bias_sum += dv
        if GATE:
            partial = partials + tl.program_id(0).to(tl.int64) * (5 * WIDTH + 1) + column
            tl.store(partial + WIDTH, tl.sum(gate_bias_sum, 0), mask=inside)
            tl.store(partial + 4 * WIDTH, tl.sum(gain_sum, 0), mask=inside)
            tl.store(partials + tl.program_id(0).to(tl.int64) * (5 * WIDTH + 1) + 5 * WIDTH, tl.sum(scale_sum))
        else:
            partial = partials + tl.program_id(0).to(tl.int64) * 3 * WIDTH + column
        tl.store(partial, tl.sum(bias_sum, 0), mask=inside)
        tl.store(partial + paths * WIDTH, tl.sum(norm_sum, 0), mask=inside)
        tl.store(partial + (paths + 1) * WIDTH, tl.sum(shift_sum, 0), mask=inside)


@torch.library.impl("intbmoe::gated_rows", "default")
def _run(rows, bias, gain, scale, norm_gain, norm_shift, ends, norm_eps):
    count, width, groups = rows.shape[0], norm_gain.shape[0], ends.shape[0]
    out, statistics = _allocate(rows, bias, gain, scale, norm_gain, norm_shift, ends, norm_eps)
    rows = in_rows(rows)
    sizes = FORWARD.chunk(width, count)
    if count:
        with on_device(rows):
            _gated_rows_forward[(programs(count, groups, sizes["ROWS"]),)](
                rows, bias, gain, scale, norm_gain, norm_shift, ends, out, statistics,
                norm_eps, ROW_STRIDE=rows.stride(0), OUT_STRIDE=out.stride(0), WIDTH=width,
                GATE=gain is not None, RMS_EPS=RMS_EPS, GROUPS=groups, PADDED=power_of_2(groups),
                **sizes,
            )  # fmt: skip
    return out, statistics


@torch.library.register_fake("intbmoe::gated_rows")
def _allocate(rows, bias, gain, scale, norm_gain, norm_shift, ends, norm_eps):
    out = empty_rows(rows, rows.shape[0], norm_gain.shape[0])
    return out, rows.new_empty(rows.shape[0], STATISTICS, dtype=torch.float32)


@torch.library.impl("intbmoe::gated_rows_backward", "default")
def _run_backward(grad, rows, statistics, bias, gain, scale, norm_gain, ends):
    count, width, groups = rows.shape[0], norm_gain.shape[0], ends.shape[0]
    row_grad, sums = _allocate_backward(grad, rows, statistics, bias, gain, scale, norm_gain, ends)
    tiling = next(tiling for widest, tiling in BACKWARD.items() if widest is None or width <= widest)
    sizes = tiling.chunk(width, count)
    number = programs(count, groups, sizes["ROWS"])
    if count == 0:
        return row_grad, sums.zero_()
    grad, rows = in_rows(grad), in_rows(rows)
    partials = sums.new_empty(number, sums.shape[1])
    with on_device(rows):
        _gated_rows_backward[(number,)](
            grad, rows, statistics, bias, gain, scale, norm_gain, ends, row_grad, partials,
            GRAD_STRIDE=grad.stride(0), ROW_STRIDE=rows.stride(0), ROW_GRAD_STRIDE=row_grad.stride(0), WIDTH=width,
            GATE=gain is not None, GROUPS=groups, PADDED=power_of_2(groups), **sizes,
        )  # fmt: skip
    return row_grad, sum_partials(partials, ends, sizes["ROWS"])


@torch.library.register_fake("intbmoe::gated_rows_backward")
def _allocate_backward(grad, rows, statistics, bias, gain, scale, norm_gain, ends):
    width = norm_gain.shape[0]
    columns = 3 * width if gain is None else 5 * width + 1
    return empty_rows(rows, *rows.shape), rows.new_empty(ends.shape[0], columns, dtype=torch.float32)


def _save(ctx, inputs, output):
    rows, bias, gain, scale, norm_gain, _, ends, _ = inputs
    ctx.save_for_backward(rows, output[1], bias, gain, scale, norm_gain, ends)


def _differentiate(ctx, grad, _):
    rows, statistics, bias, gain, scale, norm_gain, ends = ctx.saved_tensors
    row_grad, sums = torch.ops.intbmoe.gated_rows_backward(grad, rows, statistics, bias, gain, scale, norm_gain, ends)
    width, paths = norm_gain.shape[0], 1 if gain is None else 2
    bias_grad, rest = sums[:, : paths * width], sums[:, paths * width :].sum(0)
    gain_grad = scale_grad = None
    if gain is not None:
        gain_grad, scale_grad = rest[2 * width : 3 * width], rest[3 * width :]
    return row_grad, bias_grad, gain_grad, scale_grad, rest[:width], rest[width : 2 * width], None, None


torch.library.register_autograd("intbmoe::gated_rows", _differentiate, setup_context=_save)
differentiable_once("intbmoe::gated_rows_backward")
