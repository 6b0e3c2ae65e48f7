"""The gradients of gate and up from that of a SwiGLU network's result, in one Triton kernel where that is faster.

cuBLAS's product followed by a kernel would write the gradient of SiLU(gate) ⊙ up and read it again. Here a tile of that
product is multiplied by SwiGLU's derivatives in registers. Its gates and ups are asked for before the product begins,
and arrive meanwhile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from intbmoe.ops.grouped_mm.fused import describable, described
from intbmoe.ops.grouped_mm.fused_kernels import swizzle
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.swiglu.fused_rows import derivatives, swiglu_gradient
from intbmoe.ops.triton_support import ceil_div, shared_memory

ROWS, COLUMNS, INPUTS, WARPS, STAGES, SWIZZLE = 128, 64, 64, 4, 3, 8
SHARED = 101_376
"""Bytes of shared memory that a program may need."""
WIDEST = 200
"""The most columns of the result for which the kernel is used. On an H200 a backward became 9 % faster with 192 columns
and 512 hidden units, not with 256 and 688, and slower from 768 on."""


def _suits(grad: Tensor, down: Tensor) -> bool:
    """Whether the kernel supports these tensors and is faster than cuBLAS's product followed by a kernel."""
    able = grad.dtype.itemsize == 2 and describable(grad) and describable(down)
    return able and shared_memory(grad.device) >= SHARED and len(grad) > 0 and grad.shape[1] <= WIDEST


@triton.jit
def _hidden_gradient(
    grad, down, kept, gates, ups, rows,
    HIDDEN: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWIZZLE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Take descriptors of (N, d) ``grad``, (d, h) ``down`` and the results (N, h) ``gates`` and ``ups``."""
    begin()
    tile_m, tile_n = swizzle(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(HIDDEN, BLOCK_N), SWIZZLE)
    first_row, first_column = tile_m * BLOCK_M, tile_n * BLOCK_N
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    place = kept + row.to(tl.int64)[:, None] * 2 * HIDDEN + column[None, :]
    inside = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    gate = tl.load(place, mask=inside, other=0.0)
    up = tl.load(place + HIDDEN, mask=inside, other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        a = grad.load([first_row, step * BLOCK_K])
        total = tl.dot(a, down.load([step * BLOCK_K, first_column]), total)
    dgate, dup = derivatives(total, gate.to(tl.float32), up.to(tl.float32))
    gates.store([first_row, first_column], dgate.to(HALF))
    ups.store([first_row, first_column], dup.to(HALF))


def _run(grad, down, kept):
    grad, kept = grad.contiguous(), kept.contiguous()
    if not _suits(grad, down):
        return swiglu_gradient(grad @ down, kept)
    out = _allocate(grad, down, kept)
    (rows, width), hidden = grad.shape, down.shape[1]
    block = ROWS, COLUMNS
    launch(
        _hidden_gradient, (ceil_div(rows, ROWS) * ceil_div(hidden, COLUMNS),),
        described(grad, (ROWS, INPUTS)), described(down, (INPUTS, COLUMNS)), kept,
        described(out[:, :hidden], block), described(out[:, hidden:], block), rows,
        HIDDEN=hidden, STEPS=ceil_div(width, INPUTS), BLOCK_M=ROWS, BLOCK_N=COLUMNS, BLOCK_K=INPUTS,
        SWIZZLE=SWIZZLE, HALF=tl.bfloat16 if grad.dtype == torch.bfloat16 else tl.float16,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def _allocate(grad, down, kept):
    return torch.empty_like(kept)


def _flops(grad_shape, down_shape, *_, **__):
    return 2 * grad_shape[0] * down_shape[0] * down_shape[1]


# (N, d) gradient, (d, h) weights and (N, 2·h) [gate | up] of the tokens → (N, 2·h) gradients [gate | up].
hidden_gradient = define("swiglu_hidden_gradient", schema_of(_allocate), _run, _allocate, flops=_flops)
