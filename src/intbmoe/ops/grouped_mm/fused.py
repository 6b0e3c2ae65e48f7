"""The grouped product and its weight gradient in Triton; the latter by torch where that is faster.

No launch waits for the device or depends on the sizes of the groups; sums are taken in a fixed order, in float32.
Tiles come from ``mm_tile`` and ``outer_tile``, fixed tables keyed on shapes, so a run takes the same path every time.
Benchmarks and tests can pass another tile to ``run_mm`` and ``run_outer``.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.checks import require
from intbmoe.ops.backend import DTYPES, triton_runs
from intbmoe.ops.grouped_mm import operations
from intbmoe.ops.launch import launch
from intbmoe.ops.triton_support import ALIGNMENT, capability, empty_matrices, empty_rows, in_rows, power_of_2

PROCESSORS = 132  # multiprocessors assumed of every device, because sums must not depend on the device

# The numbers of inputs from which persistent programs, which loop over tiles, are worthwhile; from which their tiles
# should be wide; and from which wide tiles are worthwhile with one tile per program. Measured on an H200
# (benchmarks/gpu_grouped_mm.py), like all other entries.
FEW, SOME, LONG = 192, 512, 768
NARROW = 64  # columns of the tiles that persistent programs use for groups shorter than a tile; not tuned


class Tile(NamedTuple):
    """How one program works: it computes ``m`` × ``n`` results, ``k`` terms of their sums at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int  # tiles of factors in flight
    swizzle: int = 8  # tiles along m before the next one along n
    descriptors: bool = False  # read factors that are aligned to 16 bytes through tensor descriptors
    # Persistent programs per multiprocessor, if both factors are read through descriptors and every row has a group.
    # Otherwise, and if 0, there is one program per tile.
    persistent: int = 0
    split: bool = False  # where TF32 is not allowed, make a float32 product of three TF32 ones, which are as exact


def mm_tile(rows: int, groups: int, inputs: int, outputs: int, dtype: torch.dtype, through: bool = False) -> Tile:
    """The tile of ``grouped_mm``; ``through`` says that programs may be persistent (``Tile.persistent``)."""
    share = rows // max(groups, 1)
    if dtype == torch.float32:
        tile = Tile(16, 64, 32, 4, 3) if share <= 16 else Tile(128, 64, 32, 4, 3, split=True)
    elif share <= 16:
        tile = Tile(16, 128, 64, 4, 4, descriptors=True)
    elif share <= 64:
        tile = Tile(64, 128, 64, 4, 4, descriptors=True)
    elif through and share >= 256 and outputs >= 128 and _goes_through(rows, inputs, outputs):
        wide = inputs >= SOME and _wide(outputs)
        shape = (128, 256, 64, 8, 4) if wide else (128, 128, 64, 4, 3)
        tile = Tile(*shape, descriptors=True, persistent=1 if wide else 2)
    elif inputs >= LONG and _wide(outputs):
        tile = Tile(128, 256, 64, 8, 4, descriptors=True)
    else:  # with few steps, two programs per processor hide each other's start and end
        tile = Tile(128, 128, 64, 4, 3, descriptors=True)
    return tile._replace(n=_fit(tile.n, outputs), k=_fit(tile.k, inputs))


def outer_tile(inputs: int, outputs: int, dtype: torch.dtype) -> Tile:
    """The tile of ``grouped_outer``: m of the inputs, n of the outputs, k rows."""
    if dtype == torch.float32:
        tile = Tile(64, 64, 32, 4, 3)
    elif outputs >= LONG:
        tile = Tile(128, 256, 64, 8, 4, descriptors=True)
    else:
        tile = Tile(128, 128, 64, 4, 3, descriptors=True)
    return tile._replace(m=_fit(tile.m, inputs), n=_fit(tile.n, outputs))


def torch_outer_is_faster(rows: int, groups: int, inputs: int, outputs: int, dtype: torch.dtype) -> bool:
    """Whether torch's own kernel is faster: by 10 to 17 % on an H200, at widths 2048 → 5632 and 4096 → 14336."""
    return dtype == torch.bfloat16 and min(inputs, outputs) >= 2048 and rows >= 256 * groups


def outer_parts(rows: int, groups: int, inputs: int, outputs: int, tile: Tile) -> int:
    """The number of parts into which ``grouped_outer`` cuts each group's rows.

    A part costs a write and a read of the whole result, so there are only as many as fill the device twice, and none
    is shorter than 8 steps.
    """
    programs = groups * math.ceil(inputs / tile.m) * math.ceil(outputs / tile.n)
    wanted = math.ceil(2 * PROCESSORS / programs)
    useful = rows // (groups * 8 * tile.k)
    return max(1, min(wanted, useful, 16))


def _goes_through(rows: int, inputs: int, outputs: int) -> bool:
    """Whether persistent programs are faster; they are not with few tiles of many steps each."""
    longest = 2048 if _wide(outputs) else LONG
    rounds = _rounds(rows, outputs)
    return inputs >= FEW and (rounds >= 2 if inputs <= longest else rounds >= 7 and _wide(outputs))


def _wide(outputs: int) -> bool:
    """Whether tiles of 256 columns compute only a few more columns than tiles of 128."""
    return math.ceil(outputs / 256) * 256 <= 1.1 * (math.ceil(outputs / 128) * 128)


def _rounds(rows: int, outputs: int) -> float:
    """The number of 128 × 256 tiles per multiprocessor."""
    return rows / 128 * math.ceil(outputs / 256) / PROCESSORS


def _fit(block: int, width: int) -> int:
    """``block``, or the smallest power of two ≥ 16 that holds ``width`` if that is less."""
    return min(block, power_of_2(width, 16))


def run_mm(x: Tensor, weight: Tensor, offsets: Tensor, complete: bool, tile: Tile | None = None) -> Tensor:
    """``grouped_mm`` without autograd, with the given tile."""
    _check(x, weight, "weight", offsets)
    rows = x.shape[0]
    groups, inputs, outputs = weight.shape
    out = empty_rows(x, rows, outputs)
    if out.numel() == 0:
        return out
    from intbmoe.ops.grouped_mm import fused_kernels

    x = in_rows(x)
    transposed = weight.stride(2) != 1 and weight.stride(1) == 1
    matrices = weight.mT if transposed else weight
    x_described, weight_described = describable(x), describable(matrices)
    through = complete and x_described and weight_described
    tile = tile or mm_tile(rows, groups, inputs, outputs, x.dtype, through)
    x_described, weight_described = tile.descriptors and x_described, tile.descriptors and weight_described
    slots = rows // tile.m + groups + (not complete)
    tiles = slots * math.ceil(outputs / tile.n)
    x_factor = described(x, (tile.m, tile.k)) if x_described else x
    weight_block = (1, tile.n, tile.k) if transposed else (1, tile.k, tile.n)
    weight_factor = described(matrices, weight_block) if weight_described else weight
    by_pointers = () if x_described and weight_described else (inputs, x.stride(0), *matrices.stride()[:2])
    unit = math.gcd(16, outputs, out.stride(0), *by_pointers)
    sizes = {"UNIT": unit, "GROUPS": power_of_2(groups), "W_TRANSPOSED": transposed, **_launch(tile)}
    if tile.persistent and tile.descriptors and through:
        narrow = min(tile.n, NARROW)
        narrow_block = (1, narrow, tile.k) if transposed else (1, tile.k, narrow)
        launch(
            fused_kernels.mm_through, (min(tiles, tile.persistent * PROCESSORS),),
            x_factor, weight_factor, described(matrices, narrow_block), out,
            described(out, (tile.m, tile.n // 2)), offsets, groups, outputs, out.stride(0),
            STEPS=math.ceil(inputs / tile.k), NARROW=narrow, **sizes,
        )  # fmt: skip
    else:
        launch(
            fused_kernels.mm, (tiles,),
            x_factor, weight_factor, out, offsets, rows, groups, inputs, outputs,
            x.stride(0), *weight.stride(), out.stride(0), slots, X_TMA=x_described, W_TMA=weight_described,
            EVEN_I=inputs % tile.k == 0, EVEN_O=outputs % tile.n == 0, COMPLETE=complete, **sizes,
        )  # fmt: skip
    return out


def run_outer(x: Tensor, grad: Tensor, offsets: Tensor, tile: Tile | None = None, splits: int | None = None) -> Tensor:
    """``grouped_outer`` without autograd, with the given tile and number of parts per group."""
    _check(x, grad, "grad", offsets)
    groups, inputs, outputs = offsets.shape[0], x.shape[1], grad.shape[1]
    if grad.shape[0] == 0 or groups * inputs * outputs == 0:
        return empty_matrices(x, groups, inputs, outputs).zero_()
    from intbmoe.ops.grouped_mm import fused_kernels

    shape = grad.shape[0], groups, inputs, outputs
    x, grad = in_rows(x), in_rows(grad)
    if tile is None and torch_outer_is_faster(*shape, x.dtype) and _torch_can(x, grad):
        return F.grouped_mm(x.t(), grad, offs=offsets)
    out = empty_matrices(x, groups, inputs, outputs)
    tile = tile or outer_tile(inputs, outputs, x.dtype)
    splits = splits or outer_parts(*shape, tile)
    x_described = tile.descriptors and describable(x)
    grad_described = tile.descriptors and describable(grad)
    by_pointers = () if x_described and grad_described else (inputs, x.stride(0), grad.stride(0))
    # Parts have the same strides as the result, so they can be added as flat memory.
    size = groups * out.stride(0)
    target = out if splits == 1 else x.new_empty(splits * size, dtype=torch.float32)
    tiles = math.ceil(inputs / tile.m) * math.ceil(outputs / tile.n)
    launch(
        fused_kernels.outer, (tiles, splits, groups),
        described(x, (tile.k, tile.m)) if x_described else x,
        described(grad, (tile.k, tile.n)) if grad_described else grad,
        target, offsets, inputs, outputs, x.stride(0), grad.stride(0), out.stride(1),
        UNIT=math.gcd(16, outputs, out.stride(1), *by_pointers),
        X_TMA=x_described, GRAD_TMA=grad_described, EVEN_I=inputs % tile.m == 0, EVEN_O=outputs % tile.n == 0,
        SPLITS=splits, **_launch(tile),
    )  # fmt: skip
    if splits > 1:
        block = 1024
        used = size - out.stride(1) + outputs  # the last row has no padding
        launch(fused_kernels.sum_parts, (math.ceil(used / block),), target, out, size, used, SPLITS=splits, BLOCK=block)
    return out


def _check(x: Tensor, other: Tensor, name: str, offsets: Tensor) -> None:
    require(x.dtype in DTYPES, "x.dtype", x.dtype, "float32, bfloat16 or float16")
    require(other.dtype == x.dtype, f"{name}.dtype", other.dtype, f"that of x, {x.dtype}")
    require(offsets.dtype == torch.int32, "offsets.dtype", offsets.dtype, "torch.int32")
    where = "a CUDA device (or the CPU in Triton's interpreter, TRITON_INTERPRET=1)"
    require(triton_runs(x.device, x.dtype), "x.device", str(x.device), where)


def _torch_can(x: Tensor, grad: Tensor) -> bool:
    """Whether torch computes the weight gradient correctly: on Blackwell, empty groups get arbitrary values.

    https://github.com/pytorch/pytorch/issues/172439
    """
    hopper = x.is_cuda and capability(x.device) == (9, 0)
    return hopper and describable(x) and describable(grad)


def describable(x: Tensor) -> bool:
    """Whether a tensor descriptor can read ``x``: contiguous rows, each aligned to 16 bytes."""
    aligned = all(stride > 0 and stride * x.element_size() % ALIGNMENT == 0 for stride in x.stride()[:-1])
    able = x.device.type == "cpu" or capability(x.device) >= (9, 0)
    return able and x.stride(-1) == 1 and aligned and x.data_ptr() % ALIGNMENT == 0


def described(x: Tensor, block: tuple[int, ...]) -> object:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def _launch(tile: Tile) -> dict[str, Any]:
    # Float32 products are as exact as torch's own. Reading ``allow_tf32`` would raise if ``fp32_precision`` was set;
    # ``fp32_precision`` reflects both settings.
    coarse = torch.backends.cuda.matmul.fp32_precision == "tf32"
    precision = "tf32" if coarse else "tf32x3" if tile.split else "ieee"
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "SWIZZLE": tile.swizzle}
    return {**blocks, "PRECISION": precision, "num_warps": tile.warps, "num_stages": tile.stages}


_multiply, grouped_outer = operations.define("fused_mm", "fused_outer", run_mm, run_outer)


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, complete: bool = False) -> Tensor:
    """As ``naive.grouped_mm``, for a row- or column-major ``weight``.

    ``complete`` says that no rows follow the last group, or that nothing uses them: they are neither read nor written.
    """
    return _multiply(x, weight, offsets, complete)
