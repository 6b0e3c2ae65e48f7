"""Composition as one matrix product in Triton, written once in the type and layout that the next product needs.

The product is coefficients (P·K, E) times the pool (E, i·o); the result is cast, with the paths of a row side by side.
It is as exact as in float32, but made of several products on tensor cores: three in TF32, or six in bfloat16 where
arithmetic is the bottleneck (twice as fast on an H200).

**Few rows** (P·K ≤ ``FEW_ROWS``): the product is skinny. The pool is read once and the blocks are written once.

**Many rows** would not fit into a program's registers. Each program computes a tile of them. Tiles of the same columns
run at the same time and share them in the L2 cache.

**Many rows of few bases** (E ≤ ``FEW_BASES``): tensor cores, which take 16 bases at a time, would multiply mostly
zeros, and there is less to multiply than to write. So each base is multiplied and added separately.

**Backward** has two products: αᵀ times the blocks' gradient for the pool, and the blocks' gradient times the pool for
the coefficients. If the gradient is bfloat16, three products in bfloat16 are as exact as in float32, because only the
other factor must be cut into pieces. Up to ``ONE_PASS_ROWS`` rows, a program holds all of them and reads the gradient
and the pool once for both products. It loops over columns, loads ahead, and keeps its own sum of the coefficients'
gradient. More rows of few bases are taken a tile of rows at a time, also in one pass. Otherwise the two products are
two launches.

A program computes ``columns`` of one line of the matrices. If lines do not start at multiples of 16 bytes and most of
the memory traffic is the pool's, it computes that many entries of a whole matrix instead (``FLAT``), so that it reads
whole words.

The pool's biases, a matrix of one line, are composed by the same launches. Partial sums of the coefficients' gradient
are added in a fixed order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from intbmoe.ops.backend import INTERPRETING
from intbmoe.ops.compose import fused_kernels as kernels
from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.tiles import sum_programs
from intbmoe.ops.triton_support import ALIGNMENT, ceil_div, empty_matrices, in_rows, power_of_2

FEW_ROWS, ONE_PASS_ROWS, FEW_BASES = 16, 64, 4


class Cut(NamedTuple):
    """What a program computes at a time, less if there are fewer rows, bases or columns."""

    rows: int
    bases: int
    columns: int
    warps: int
    precision: str = "tf32x3"
    least_rows: int = 16  # tensor cores take 16 rows and, in backward, 8 bases
    least_bases: int = 16
    programs: int = 0  # that leave partial sums: about this many. The same on all devices, as sums depend on it


# Measured on an H200, except for the first.
FEW_BASES_CUT = Cut(rows=16, bases=1, columns=256, warps=4, least_rows=1, least_bases=1)
FEW_BASES_BACKWARD_CUT = Cut(rows=16, bases=1, columns=128, warps=1, least_rows=1, least_bases=1)
FEW_ROWS_CUT = Cut(rows=16, bases=32, columns=128, warps=2)
SOME_ROWS_CUT = Cut(rows=32, bases=16, columns=128, warps=2)
MANY_ROWS_CUT = Cut(rows=64, bases=32, columns=128, warps=4, precision="bf16x6")
POOL_CUT = Cut(rows=32, bases=64, columns=128, warps=4, precision="bf16x6")
COEFFICIENTS_CUT = Cut(rows=64, bases=64, columns=64, warps=4, precision="bf16x6", programs=1056)

# Chosen by registers and instructions, and for as many programs as an H200 runs at once; no others were measured.
# With 32 rows instead of 64, warps would compute the same numbers more than once.
FEW_ROWS_BACKWARD_CUT = Cut(rows=16, bases=16, columns=64, warps=1, least_bases=8, programs=1584)
ONE_PASS_CUT = Cut(rows=64, bases=16, columns=64, warps=4, least_rows=64, least_bases=8, programs=528)
ONE_PASS_MANY_BASES_CUT = Cut(rows=64, bases=64, columns=64, warps=4, least_rows=64, programs=264)
ONE_PASS_BASES = 32
"""With more bases, a program of one pass takes more of them, because each tile of bases reads the gradient again."""
FEW_WARPS, SMALL_BACKWARD_COLUMNS = 1000, 32
"""A pass of fewer warps than this gets smaller programs. So does one over types other than bfloat16, for want of
registers."""
BIAS_COLUMNS = 32  # fewer than of a matrix: biases' gradients are float32, which takes more registers

SMALL_MATRIX = 200_000
"""Matrices with at most this many entries are composed by smaller programs, so that there are enough of them for a
large GPU. 192 × 768 became faster; larger matrices were not tried."""
SMALL_COLUMNS = 64

THREE_TILES, THREE_TILES_BASES = 48, 65
"""At most this many rows, with at least this many bases, are composed in three tiles of 16; a quarter of one tile of 64
would be empty. Tried with 200 bases; with 48 bases and 24 rows, tiles of 16 were slower than one of 32."""
THREE_TILES_CUT = Cut(rows=16, bases=16, columns=128, warps=2)


def _few_bases(rows: int, bases: int) -> bool:
    return rows > FEW_ROWS and bases <= FEW_BASES


def _three_tiles(rows: int, bases: int) -> bool:
    return SOME_ROWS_CUT.rows < rows <= THREE_TILES and bases >= THREE_TILES_BASES


def _small(pool: Tensor) -> bool:
    return _size(pool) <= SMALL_MATRIX


def _forward_cut(rows: int, pool: Tensor) -> Cut:
    if _few_bases(rows, len(pool)):
        return FEW_BASES_CUT
    if rows > SOME_ROWS_CUT.rows:
        return THREE_TILES_CUT if _three_tiles(rows, len(pool)) else MANY_ROWS_CUT
    cut = FEW_ROWS_CUT if rows <= FEW_ROWS else SOME_ROWS_CUT
    return cut._replace(columns=SMALL_COLUMNS) if _small(pool) else cut


def _one_pass_cut(rows: int, pool: Tensor, dtype: torch.dtype) -> Cut:
    if rows <= FEW_ROWS:
        cut = FEW_ROWS_BACKWARD_CUT
    else:
        cut = ONE_PASS_CUT if len(pool) <= ONE_PASS_BASES else ONE_PASS_MANY_BASES_CUT
    warps = ceil_div(_size(pool), cut.columns) * ceil_div(len(pool), cut.bases) * cut.warps
    small = warps < FEW_WARPS or dtype != torch.bfloat16
    return cut._replace(columns=SMALL_BACKWARD_COLUMNS) if small else cut


def _sizes(
    value: Tensor, gate: Tensor | None, pool: Tensor, composed: Tensor, bias_composed: Tensor | None, cut: Cut,
    passes: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Launch arguments for a ``cut``; ``passes`` counts reads and writes of the pool or of a tensor of its size."""
    (blocks, bases), width = value.shape, pool.shape[2]
    paths = 1 if gate is None else 2
    odd = width % (ALIGNMENT // pool.element_size()) != 0 and pool.shape[1] > 1
    flat = odd and passes * bases * pool.element_size() > paths * blocks * composed.element_size()
    return {
        "WIDTH": width,
        "ROW_STRIDE": composed.stride(1),
        "BLOCK_STRIDE": composed.stride(0),
        "BIAS_STRIDE": 0 if bias_composed is None else bias_composed.stride(0),
        "BLOCKS": blocks,
        "PATHS": paths,
        "E": bases,
        "ROWS": min(power_of_2(paths * blocks, cut.least_rows), cut.rows),
        "STEP": min(power_of_2(bases, cut.least_bases), cut.bases),
        "BLOCK": cut.columns if flat else min(cut.columns, power_of_2(width, 16)),
        "BIAS_BLOCK": min(BIAS_COLUMNS, power_of_2(width, 16)),
        "FLAT": flat,
        "PRECISION": "ieee" if INTERPRETING else cut.precision,  # the interpreter does not know bf16x6
        "num_warps": cut.warps,
    }


def _size(pool: Tensor) -> int:
    """The entries of a base; the stride of a single base may be anything."""
    return pool.shape[1] * pool.shape[2]


def _items(pool: Tensor, sizes: dict[str, Any]) -> int:
    if sizes["FLAT"]:
        return ceil_div(_size(pool), sizes["BLOCK"])
    return pool.shape[1] * ceil_div(pool.shape[2], sizes["BLOCK"])


def _bias_items(bias: Tensor | None, sizes: dict[str, Any]) -> int:
    return 0 if bias is None else ceil_div(sizes["WIDTH"], sizes["BIAS_BLOCK"])


def _row_tiles(sizes: dict[str, Any]) -> int:
    return ceil_div(sizes["PATHS"] * sizes["BLOCKS"], sizes["ROWS"])


def _base_tiles(sizes: dict[str, Any]) -> int:
    return ceil_div(sizes["E"], sizes["STEP"])


def _programs(items: int, tiles: int, cut: Cut) -> int:
    """Return how many programs loop over the items of each tile; all get the same number of items, give or take one."""
    return ceil_div(items, max(1, ceil_div(items, ceil_div(cut.programs, tiles))))


def _laid_out(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _run(value, gate, pool, bias, factor, dtype):
    out, bias_out = _allocate(value, gate, pool, bias, factor, dtype)
    value, gate, pool, bias = _laid_out(value, gate, pool, bias)
    cut = _forward_cut(len(value) * (1 if gate is None else 2), pool)
    sizes = _sizes(value, gate, pool, out, bias_out, cut)
    items = _items(pool, sizes)
    grid = ((items + _bias_items(bias, sizes)) * _row_tiles(sizes),)
    launch(kernels.compose_forward, grid, value, gate, pool, bias, out, bias_out, factor, _size(pool), items, **sizes)
    return out, bias_out


def _allocate(value, gate, pool, bias, factor: float, dtype: torch.dtype):
    paths = 1 if gate is None else 2
    blocks, width = value.shape[0], paths * pool.shape[2]
    biases = pool.new_empty(0 if bias is None else blocks, width, dtype=torch.float32)
    return empty_matrices(pool, blocks, pool.shape[1], width, dtype), biases


def _run_backward(grad, bias_grad, value, gate, pool, bias, factor):
    sums, pool_grad, bias_pool_grad = _allocate_backward(grad, bias_grad, value, gate, pool, bias, factor)
    value, gate, pool, bias = _laid_out(value, gate, pool, bias)
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    bias_grad = None if bias is None else in_rows(bias_grad)
    grads, paths, bases, found = (grad, bias_grad), (value, gate), (pool, bias), (pool_grad, bias_pool_grad)
    end = factor, _size(pool)
    if len(sums) <= ONE_PASS_ROWS:
        cut = _one_pass_cut(len(sums), pool, grad.dtype)
        sizes = _sizes(*paths, pool, *grads, cut, passes=2)
        items, tiles = _items(pool, sizes), _base_tiles(sizes)
        programs = _programs(items, tiles, cut)
        partials = sums.new_empty(programs + _bias_items(bias, sizes), *sums.shape)
        launch(
            kernels.one_pass_backward, (len(partials), tiles),
            *grads, *paths, *bases, *found, partials, *end, items, programs, **sizes,
        )  # fmt: skip
    elif _few_bases(*sums.shape):
        sizes = _sizes(*paths, pool, *grads, FEW_BASES_BACKWARD_CUT, passes=2)
        items = _items(pool, sizes)
        partials = sums.new_empty(items + _bias_items(bias, sizes), *sums.shape)
        launch(
            kernels.few_bases_backward, (len(partials),),
            *grads, *paths, *bases, *found, partials, *end, items, **sizes,
        )  # fmt: skip
    else:
        sizes = _sizes(*paths, pool, *grads, COEFFICIENTS_CUT)
        items, tiles = _items(pool, sizes), _row_tiles(sizes) * _base_tiles(sizes)
        programs = _programs(items, tiles, COEFFICIENTS_CUT)
        partials = sums.new_empty(programs + _bias_items(bias, sizes), *sums.shape)
        launch(
            kernels.coefficients_backward, (len(partials) * tiles,),
            *grads, pool, bias, partials, *end, items, programs, **sizes,
        )  # fmt: skip
        sizes = _sizes(*paths, pool, *grads, POOL_CUT)
        items = _items(pool, sizes)
        launch(
            kernels.pool_backward, ((items + _bias_items(bias, sizes)) * _base_tiles(sizes),),
            *grads, *paths, *found, *end, items, **sizes,
        )  # fmt: skip
    return sum_programs(partials), *found


def _allocate_backward(grad, bias_grad, value, gate, pool, bias, factor: float):
    rows = value.shape[0] * (1 if gate is None else 2)
    pool_grad = torch.empty_like(pool, memory_format=torch.contiguous_format)
    bias_shape = (0,) if bias is None else bias.shape
    sums = value.new_empty(rows, value.shape[1], dtype=torch.float32)
    return sums, pool_grad, pool.new_empty(bias_shape, dtype=pool.dtype if bias is None else bias.dtype)


def _save(ctx, inputs, output):
    value, gate, pool, bias, ctx.factor, _ = inputs
    ctx.save_for_backward(value, gate, pool, bias)


def _differentiate(ctx, grad, bias_grad):
    value, gate, pool, bias = ctx.saved_tensors
    blocks, width = value.shape[0], pool.shape[2] * (1 if gate is None else 2)
    grad = pool.new_zeros(blocks, pool.shape[1], width) if grad is None else grad
    bias_grad = pool.new_zeros(blocks, width) if bias_grad is None and bias is not None else bias_grad
    sums, pool_grad, bias_pool_grad = compose_gradient(
        grad, None if bias is None else bias_grad, value, gate, pool, bias, ctx.factor
    )
    value_grad = sums[:blocks].to(value.dtype)
    gate_grad = None if gate is None else sums[blocks:].to(gate.dtype)
    return value_grad, gate_grad, pool_grad, None if bias is None else bias_pool_grad, None, None


def _flops(value_shape, gate_shape, pool_shape, bias_shape, *_, **__):
    rows = value_shape[0] * (1 if gate_shape is None else 2)
    lines = pool_shape[1] + (0 if bias_shape is None else 1)
    return 2 * rows * pool_shape[0] * lines * pool_shape[2]


# Coefficients (K, E), times a factor, a pool (E, i, o) and its biases (E, o) or None → (K, i, P·o), rows aligned, in
# ``dtype``, and (K, P·o) in float32.
compose = define("compose", schema_of(_allocate, 2), _run, _allocate, _save, _differentiate, _flops)
compose_gradient = define(
    "compose_backward",
    schema_of(_allocate_backward, 3),
    _run_backward,
    _allocate_backward,
    flops=lambda grad_shape, bias_grad_shape, *shapes, **rest: 2 * _flops(*shapes, **rest),
)
