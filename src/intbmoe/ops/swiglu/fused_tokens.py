"""The gradients of gate, up and the tokens of a narrow SwiGLU network, in one Triton kernel.

A program has some tokens and goes through the hidden units. The gradients of gate and up are multiplied with their
weights while they are in registers, and written only for the gradients of the weights. Wider networks take a kernel
(``fused_hidden.py``) and cuBLAS's product, because a program cannot hold as many entries of its tokens' gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.grouped_mm.fused import describable, described
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.swiglu.fused_hidden import hidden_gradient
from intbmoe.ops.swiglu.fused_rows import derivatives
from intbmoe.ops.triton_support import ceil_div, power_of_2, shared_memory

ROWS, COLUMNS, WARPS, STAGES = 64, 64, 4, 2
SHARED = 132_096
"""Bytes of shared memory that a program may need."""
WIDEST, MOST_HIDDEN = 128, 512
"""The widest tokens and the most hidden units for which the kernel is used. On an H200 it took 7 to 12 µs where the
other kernel and cuBLAS's product took 8.5 to 13 (64 to 128 columns)."""


def _suits(*factors: Tensor) -> bool:
    """Whether the kernel supports the factors of both products, and is faster than a kernel and cuBLAS's product."""
    grad, down, _ = factors
    able = grad.dtype.itemsize == 2 and all(map(describable, factors)) and shared_memory(grad.device) >= SHARED
    return able and len(grad) > 0 and grad.shape[1] <= WIDEST and down.shape[1] <= MOST_HIDDEN


@triton.jit
def _gates_and_ups(kept, row, first, rows, HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr):
    column = first + tl.arange(0, BLOCK_N)
    place = kept + row.to(tl.int64)[:, None] * 2 * HIDDEN + column[None, :]
    inside = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    return tl.load(place, mask=inside, other=0.0), tl.load(place + HIDDEN, mask=inside, other=0.0)


@triton.jit
def _token_gradient(
    grad, down, weight, kept, gates, ups, out, rows,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Take descriptors of (N, d) ``grad``, (d, h) ``down``, (2·h, d) ``weight``, (N, h) results and (N, d) ``out``.

    Each step's gates and ups are asked for one step earlier.
    """
    begin()
    first = tl.program_id(0) * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    gate, up = _gates_and_ups(kept, row, 0, rows, HIDDEN, BLOCK_N)
    tokens = grad.load([first, 0])
    total = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    for column in range(0, HIDDEN, BLOCK_N):
        next_gate, next_up = _gates_and_ups(kept, row, column + BLOCK_N, rows, HIDDEN, BLOCK_N)
        product = tl.dot(tokens, down.load([0, column]))
        dgate, dup = derivatives(product, gate.to(tl.float32), up.to(tl.float32))
        dgate, dup = dgate.to(HALF), dup.to(HALF)
        gates.store([first, column], dgate)
        ups.store([first, column], dup)
        total = tl.dot(dgate, weight.load([0, column, 0]).reshape(BLOCK_N, WIDTH), total)
        total = tl.dot(dup, weight.load([1, column, 0]).reshape(BLOCK_N, WIDTH), total)
        gate, up = next_gate, next_up
    out.store([first, 0], total.to(HALF))


def _run(grad, down, kept, joined):
    grad, kept = grad.contiguous(), kept.contiguous()
    if not _suits(grad, down, joined):
        hidden_grad = hidden_gradient(grad, down, kept)
        return hidden_grad, hidden_grad @ joined
    hidden_grad, x_grad = _allocate(grad, down, kept, joined)
    (rows, width), hidden = grad.shape, down.shape[1]
    whole, block = power_of_2(width, 16), (ROWS, COLUMNS)
    launch(
        _token_gradient, (ceil_div(rows, ROWS),),
        described(grad, (ROWS, whole)), described(down, (whole, COLUMNS)),
        described(joined.view(2, hidden, width), (1, COLUMNS, whole)), kept,
        described(hidden_grad[:, :hidden], block), described(hidden_grad[:, hidden:], block),
        described(x_grad, (ROWS, whole)), rows,
        HIDDEN=hidden, WIDTH=whole, BLOCK_M=ROWS, BLOCK_N=COLUMNS,
        HALF=tl.bfloat16 if grad.dtype == torch.bfloat16 else tl.float16, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return hidden_grad, x_grad


def _allocate(grad, down, kept, joined):
    return torch.empty_like(kept), torch.empty_like(grad, memory_format=torch.contiguous_format)


def _flops(grad_shape, down_shape, *_, **__):
    return 6 * grad_shape[0] * down_shape[0] * down_shape[1]


# (N, d) gradient, (d, h) weights, (N, 2·h) [gate | up] of the tokens and (2·h, d) weights → the gradients (N, 2·h)
# [gate | up] and (N, d) of the tokens.
token_gradient = define("swiglu_token_gradient", schema_of(_allocate, 2), _run, _allocate, flops=_flops)
