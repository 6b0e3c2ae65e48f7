"""The whole hypernetwork in one Triton kernel forward and one backward.

It is tiny, so its cost is the number of kernel launches: plain torch runs five operations forward and twelve backward.
In the forward, the codes and bases are divided among programs, and each program recomputes the hidden layer of its
codes. In the backward, one program does everything, a few bases at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.tiles import relu
from intbmoe.ops.triton_support import ceil_div, power_of_2

ROWS, BASES, BACKWARD_BASES = 16, 64, 32


def coefficients(codes: Tensor, trunk, norm, eps: float, value, gate) -> tuple[Tensor, Tensor | None]:
    """As ``naive.coefficients``, for a few codes."""
    first, second = _coefficients(codes, *trunk, *norm, *value, *(gate or (None, None)), eps)
    return first, None if gate is None else second


@triton.jit
def _load(base, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of a (ROWS, COLUMNS) matrix in float32, with zeros outside the matrix."""
    mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(base + row[:, None] * COLUMNS + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _vector(base, place, WIDTH: tl.constexpr):
    return tl.load(base + place, mask=place < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _hidden(
    codes, trunk, trunk_bias, gain, shift, row, eps,
    K: tl.constexpr, C: tl.constexpr, H: tl.constexpr, CODE: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Some codes, their normalised hidden layer (n, HIDDEN) before the gain, 1/σ, and q, after the gain and ReLU."""
    unit = tl.arange(0, HIDDEN)
    column = tl.arange(0, CODE)
    code = _load(codes, row, column, K, C)
    weight = _load(trunk, unit, column, H, C)
    h = tl.dot(code, tl.trans(weight), input_precision="ieee") + _vector(trunk_bias, unit, H)[None, :]
    inside = (unit < H)[None, :]
    centred = tl.where(inside, h - (tl.sum(h, 1) / H)[:, None], 0.0)
    inverse = 1 / tl.sqrt(tl.sum(centred * centred, 1) / H + eps)
    normal = centred * inverse[:, None]
    q = relu(normal * _vector(gain, unit, H)[None, :] + _vector(shift, unit, H)[None, :])
    return code, normal, inverse, tl.where(inside, q, 0.0)


@triton.jit
def _forward(
    codes, trunk, trunk_bias, gain, shift, value, value_bias, gate, gate_bias, first, second, eps,
    K: tl.constexpr, C: tl.constexpr, H: tl.constexpr, E: tl.constexpr, CODE: tl.constexpr, HIDDEN: tl.constexpr,
    GATE: tl.constexpr, ROWS: tl.constexpr, BASES: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = tl.program_id(1) * BASES + tl.arange(0, BASES)
    unit = tl.arange(0, HIDDEN)
    _, _, _, q = _hidden(codes, trunk, trunk_bias, gain, shift, row, eps, K, C, H, CODE, HIDDEN)
    mask = (row < K)[:, None] & (base < E)[None, :]
    place = row[:, None] * E + base[None, :]
    alpha = tl.dot(q, tl.trans(_load(value, base, unit, E, H)), input_precision="ieee")
    tl.store(first + place, alpha + _vector(value_bias, base, E)[None, :], mask=mask)
    if GATE:
        alpha = tl.dot(q, tl.trans(_load(gate, base, unit, E, H)), input_precision="ieee")
        tl.store(second + place, alpha + _vector(gate_bias, base, E)[None, :], mask=mask)


@triton.jit
def _path_backward(
    grad, weight, weight_grad, bias_grad, q, row, base, unit, K: tl.constexpr, E: tl.constexpr, H: tl.constexpr
):
    """Store the gradients of one path's map for some bases; return what these bases add to q's gradient."""
    dalpha = _load(grad, row, base, K, E)
    dweight = tl.dot(tl.trans(dalpha), q, input_precision="ieee")
    place = base[:, None] * H + unit[None, :]
    tl.store(weight_grad + place, dweight, mask=(base < E)[:, None] & (unit < H)[None, :])
    tl.store(bias_grad + base, tl.sum(dalpha, 0), mask=base < E)
    return tl.dot(dalpha, _load(weight, base, unit, E, H), input_precision="ieee")


@triton.jit
def _backward(
    grad, gate_grad, codes, trunk, trunk_bias, gain, shift, value, gate, eps,
    dcodes, dtrunk, dtrunk_bias, dgain, dshift, dvalue, dvalue_bias, dgate, dgate_bias,
    K: tl.constexpr, C: tl.constexpr, H: tl.constexpr, E: tl.constexpr, CODE: tl.constexpr, HIDDEN: tl.constexpr,
    GATE: tl.constexpr, ROWS: tl.constexpr, BASES: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.arange(0, ROWS)
    unit = tl.arange(0, HIDDEN)
    column = tl.arange(0, CODE)
    code, normal, inverse, q = _hidden(codes, trunk, trunk_bias, gain, shift, row, eps, K, C, H, CODE, HIDDEN)
    dq = tl.zeros([ROWS, HIDDEN], dtype=tl.float32)
    for start in range(0, E, BASES):
        base = start + tl.arange(0, BASES)
        dq += _path_backward(grad, value, dvalue, dvalue_bias, q, row, base, unit, K, E, H)
        if GATE:
            dq += _path_backward(gate_grad, gate, dgate, dgate_bias, q, row, base, unit, K, E, H)
    there = (row < K)[:, None] & (unit < H)[None, :]
    dq = tl.where(there & ~(q <= 0), dq, 0.0)
    tl.store(dgain + unit, tl.sum(dq * normal, 0), mask=unit < H)
    tl.store(dshift + unit, tl.sum(dq, 0), mask=unit < H)
    dnormal = dq * _vector(gain, unit, H)[None, :]
    dh = dnormal - (tl.sum(dnormal, 1) / H)[:, None] - normal * (tl.sum(dnormal * normal, 1) / H)[:, None]
    dh = tl.where(there, dh * inverse[:, None], 0.0)
    known = (unit < H)[:, None] & (column < C)[None, :]
    place = unit[:, None] * C + column[None, :]
    tl.store(dtrunk + place, tl.dot(tl.trans(dh), code, input_precision="ieee"), mask=known)
    tl.store(dtrunk_bias + unit, tl.sum(dh, 0), mask=unit < H)
    weight = _load(trunk, unit, column, H, C)
    mask = (row < K)[:, None] & (column < C)[None, :]
    tl.store(dcodes + row[:, None] * C + column[None, :], tl.dot(dh, weight, input_precision="ieee"), mask=mask)


def _sizes(codes: Tensor, trunk: Tensor, value: Tensor, gate: Tensor | None) -> dict[str, int]:
    (hidden, width), experts = trunk.shape, value.shape[0]
    padded = {"CODE": power_of_2(width, 16), "HIDDEN": power_of_2(hidden, 16)}
    return {"K": codes.shape[0], "C": width, "H": hidden, "E": experts, **padded, "GATE": gate is not None}


def _run(codes, trunk, trunk_bias, gain, shift, value, value_bias, gate, gate_bias, eps):
    inputs = codes, trunk, trunk_bias, gain, shift, value, value_bias, gate, gate_bias
    first, second = _allocate(*inputs, eps)
    inputs = [None if tensor is None else tensor.contiguous() for tensor in inputs]
    sizes = _sizes(codes, trunk, value, gate)
    grid = ceil_div(sizes["K"], ROWS), ceil_div(sizes["E"], BASES)
    launch(_forward, grid, *inputs, first, second, eps, **sizes, ROWS=ROWS, BASES=BASES)
    return first, second


def _allocate(codes, trunk, trunk_bias, gain, shift, value, value_bias, gate, gate_bias, eps: float):
    count, experts = codes.shape[0], value.shape[0]
    shapes = (count, experts), (0 if gate is None else count, experts)
    return tuple(codes.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _run_backward(grad, gate_grad, codes, trunk, trunk_bias, gain, shift, value, gate, eps):
    inputs = grad, gate_grad, codes, trunk, trunk_bias, gain, shift, value, gate
    outputs = _allocate_backward(*inputs, eps)
    inputs = [None if tensor is None else tensor.contiguous() for tensor in inputs]
    sizes = _sizes(codes, trunk, value, gate)
    rows, bases = power_of_2(sizes["K"], 16), min(power_of_2(sizes["E"], 16), BACKWARD_BASES)
    launch(_backward, (1,), *inputs, eps, *outputs, **sizes, ROWS=rows, BASES=bases)
    return outputs


def _allocate_backward(grad, gate_grad, codes, trunk, trunk_bias, gain, shift, value, gate, eps: float):
    hidden, experts = trunk.shape[0], value.shape[0]
    gated = 0 if gate is None else experts
    shapes = codes.shape, trunk.shape, (hidden,), (hidden,), (hidden,)
    shapes += (experts, hidden), (experts,), (gated, hidden), (gated,)
    return tuple(codes.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _save(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    ctx.save_for_backward(*tensors[:6], tensors[7])  # no gradient depends on the paths' biases


def _differentiate(ctx, grad, gate_grad):
    *tensors, value, gate = ctx.saved_tensors
    shape = tensors[0].shape[0], value.shape[0]
    grad = value.new_zeros(shape, dtype=torch.float32) if grad is None else grad
    if gate is not None and gate_grad is None:
        gate_grad = value.new_zeros(shape, dtype=torch.float32)
    gradients = _gradient(grad, None if gate is None else gate_grad, *tensors, value, gate, ctx.eps)
    return *(None if dtype is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), None


def _flops(codes, trunk, trunk_bias, gain, shift, value, value_bias, gate, *_, **__):
    """Arguments are shapes, here and in ``_backward_flops``."""
    return 2 * codes[0] * trunk[0] * (trunk[1] + (1 if gate is None else 2) * value[0])


def _backward_flops(grad, gate_grad, codes, trunk, trunk_bias, gain, shift, value, gate, *_, **__):
    return 2 * _flops(codes, trunk, trunk_bias, gain, shift, value, None, gate)


_coefficients = define("hypernetwork", schema_of(_allocate, 2), _run, _allocate, _save, _differentiate, _flops)
_gradient = define(
    "hypernetwork_backward", schema_of(_allocate_backward, 9), _run_backward, _allocate_backward, flops=_backward_flops
)
