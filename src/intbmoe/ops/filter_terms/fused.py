"""Cast and block terms in one Triton kernel each way: plain torch runs two operations forward and five backward.

The programs divide the rows of outputs and the columns of tokens among them; for each tile of rows, one more program
has the codes. In backward, these write partial sums of the codes' gradient, which are added in a fixed order.
"""

import torch
import triton
import triton.language as tl

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.tiles import sum_programs
from intbmoe.ops.triton_support import ceil_div, power_of_2

TILE, BLOCK = 16, 256


@triton.jit
def _load(base, row, column, stride, rows, columns):
    """A tile of a matrix in float32, zero outside of it."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(base + row[:, None].to(tl.int64) * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(base, values, row, column, stride, rows, columns):
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    place = base + row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _forward(
    weight, bias, codes, token, block,
    D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, CODE: tl.constexpr, CODES: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(1) < (D + BLOCK - 1) // BLOCK:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        _store(token, _load(weight, row, column, D + C, D, D), row, column, D, D, D)
    else:
        number, code = tl.arange(0, CODES), tl.arange(0, CODE)
        code_weight = _load(weight + D, row, code, D + C, D, C)
        term = tl.dot(_load(codes, number, code, C, K, C), tl.trans(code_weight), input_precision="ieee")
        term += tl.load(bias + row, mask=row < D, other=0.0).to(tl.float32)[None, :]
        _store(block, term, number, row, D, K, D)


@triton.jit
def _backward(
    token_grad, block_grad, weight, codes, weight_grad, bias_grad, partials,
    D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, CODE: tl.constexpr, CODES: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(1) < (D + BLOCK - 1) // BLOCK:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        _store(weight_grad, _load(token_grad, row, column, D, D, D), row, column, D + C, D, D)
    else:
        number, code = tl.arange(0, CODES), tl.arange(0, CODE)
        dterm = _load(block_grad, number, row, D, K, D)
        dweight = tl.dot(tl.trans(dterm), _load(codes, number, code, C, K, C), input_precision="ieee")
        _store(weight_grad + D, dweight, row, code, D + C, D, C)
        tl.store(bias_grad + row, tl.sum(dterm, 0).to(bias_grad.dtype.element_ty), mask=row < D)
        dcodes = tl.dot(dterm, _load(weight + D, row, code, D + C, D, C), input_precision="ieee")
        _store(partials + tl.program_id(0).to(tl.int64) * K * C, dcodes, number, code, C, K, C)


def _sizes(weight, codes) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the launch arguments."""
    width, (number, code) = weight.shape[0], codes.shape
    padded = {"CODE": power_of_2(code, 16), "CODES": power_of_2(number, 16)}
    grid = ceil_div(width, TILE), ceil_div(width, BLOCK) + 1
    return grid, {"D": width, "C": code, "K": number, **padded, "TILE": TILE, "BLOCK": BLOCK}


def _run(weight, bias, codes, dtype):
    token, block = _allocate(weight, bias, codes, dtype)
    grid, sizes = _sizes(weight, codes)
    launch(_forward, grid, weight.contiguous(), bias.contiguous(), codes.contiguous(), token, block, **sizes)
    return token, block


def _allocate(weight, bias, codes, dtype: torch.dtype):
    width = weight.shape[0]
    return weight.new_empty(width, width, dtype=dtype), codes.new_empty(codes.shape[0], width, dtype=torch.float32)


def _run_backward(token_grad, block_grad, weight, codes, bias_dtype):
    weight_grad, bias_grad, code_grad = _allocate_backward(token_grad, block_grad, weight, codes, bias_dtype)
    grid, sizes = _sizes(weight, codes)
    partials = code_grad.new_empty(grid[0], *code_grad.shape)
    inputs = [tensor.contiguous() for tensor in (token_grad, block_grad, weight, codes)]
    launch(_backward, grid, *inputs, weight_grad, bias_grad, partials, **sizes)
    return weight_grad, bias_grad, sum_programs(partials)


def _allocate_backward(token_grad, block_grad, weight, codes, bias_dtype: torch.dtype):
    weight_grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
    bias_grad = weight.new_empty(weight.shape[0], dtype=bias_dtype)
    return weight_grad, bias_grad, codes.new_empty(codes.shape, dtype=torch.float32)


def _save(ctx, inputs, output):
    weight, bias, codes, _ = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(weight, codes)


def _differentiate(ctx, token_grad, block_grad):
    weight, codes = ctx.saved_tensors
    width = weight.shape[0]
    token_grad = weight.new_zeros(width, width) if token_grad is None else token_grad
    block_grad = codes.new_zeros(codes.shape[0], width) if block_grad is None else block_grad
    weight_grad, bias_grad, code_grad = _terms_gradient(token_grad, block_grad, weight, codes, ctx.bias_dtype)
    return weight_grad, bias_grad, code_grad.to(codes.dtype), None


def _flops(weight_shape, bias_shape, code_shape, *_, **__):
    return 2 * code_shape[0] * code_shape[1] * weight_shape[0]


def _backward_flops(token_shape, block_shape, weight_shape, code_shape, *_, **__):
    return 2 * _flops(weight_shape, None, code_shape)


filter_terms = define("filter_terms", schema_of(_allocate, 2), _run, _allocate, _save, _differentiate, _flops)
_terms_gradient = define(
    "filter_terms_backward", schema_of(_allocate_backward, 3), _run_backward, _allocate_backward, flops=_backward_flops
)
