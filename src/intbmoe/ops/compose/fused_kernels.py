"""The kernels of the composition; ``fused.py`` chooses their tiles and launches them.

Rows are the rows of the coefficients (P·K, E), value path first; columns are the entries of a base's matrix. An item is
the columns that a program computes at a time: ``BLOCK`` of one line of the matrices or, with ``FLAT``, of a whole
matrix. ``STEP`` is the number of bases at a time; it is 1 if there are so few bases that tensor cores would multiply
mostly zeros.

The pool's biases, a matrix of one line, are further items of the same kernels, because a separate launch would take
longer than the work itself.
"""

import triton
import triton.language as tl

from intbmoe.ops.overlap import begin
from intbmoe.ops.pieces import multiply_short


@triton.jit
def _product(a, b, total, PRECISION: tl.constexpr):
    """``total + a @ b``, as exact as in float32."""
    if a.dtype == tl.bfloat16 or b.dtype == tl.bfloat16:
        total = multiply_short(a, b, total)
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    return total


@triton.jit
def _coefficients(
    value, gate, factor, first_row, first, BLOCKS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr
):
    """(ROWS, STEP) coefficients from row ``first_row`` and base ``first`` on, value path first; zero past the ends."""
    row = first_row + tl.arange(0, ROWS)
    base = first + tl.arange(0, STEP)
    known = (base < E)[None, :]
    place = (row % BLOCKS)[:, None] * E + base[None, :]
    alpha = tl.load(value + place, mask=(row < BLOCKS)[:, None] & known, other=0.0).to(tl.float32)
    if gate is not None:
        second = (row >= BLOCKS) & (row < 2 * BLOCKS)
        alpha += tl.load(gate + place, mask=second[:, None] & known, other=0.0).to(tl.float32)
    return alpha * factor


@triton.jit
def _entries(item, size, WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """The offsets of an item's entries in a base's matrix and in a composed one, and a mask of those that exist."""
    if FLAT:
        entry = item * BLOCK + tl.arange(0, BLOCK)
        return entry, entry // WIDTH * ROW_STRIDE + entry % WIDTH, entry < size
    across: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    line = item // across
    column = item % across * BLOCK + tl.arange(0, BLOCK)
    return line * WIDTH + column, line * ROW_STRIDE + column, column < WIDTH


@triton.jit
def _matrices(pool, first, entry, inside, size, E: tl.constexpr, STEP: tl.constexpr):
    """Pointers to the pool's entries for bases from ``first`` on, and a mask of those that exist."""
    base = first + tl.arange(0, STEP)
    return pool + base[:, None].to(tl.int64) * size + entry[None, :], (base < E)[:, None] & inside[None, :]


@triton.jit
def _composed(
    out, first_row, entry, inside, WIDTH: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Pointers to the composed tensor's entries for rows from ``first_row`` on, and a mask of those that exist."""
    row = first_row + tl.arange(0, ROWS)
    start = (row % BLOCKS).to(tl.int64) * BLOCK_STRIDE + row // BLOCKS * WIDTH
    return out + start[:, None] + entry[None, :], (row < PATHS * BLOCKS)[:, None] & inside[None, :]


@triton.jit
def _compose_item(
    value, gate, pool, out, factor, size, item, first_row,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    entry, place, inside = _entries(item, size, WIDTH, ROW_STRIDE, BLOCK, FLAT)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    if STEP == 1:
        for base in tl.static_range(E):
            alpha = _coefficients(value, gate, factor, first_row, base, BLOCKS, E, ROWS, 1)
            source, known = _matrices(pool, base, entry, inside, size, E, 1)
            total += alpha * tl.load(source, mask=known, other=0.0).to(tl.float32)
    else:
        for first in range(0, E, STEP):
            alpha = _coefficients(value, gate, factor, first_row, first, BLOCKS, E, ROWS, STEP)
            source, known = _matrices(pool, first, entry, inside, size, E, STEP)
            matrix = tl.load(source, mask=known, other=0.0).to(tl.float32)
            total = tl.dot(alpha, matrix, total, input_precision=PRECISION)
    target, there = _composed(out, first_row, place, inside, WIDTH, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
    tl.store(target, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def compose_forward(
    value, gate, pool, bias, out, bias_out, factor, size, items,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin()
    tiles: tl.constexpr = (PATHS * BLOCKS + ROWS - 1) // ROWS
    first_row = tl.program_id(0) % tiles * ROWS
    item = tl.program_id(0) // tiles
    if item < items:
        _compose_item(
            value, gate, pool, out, factor, size, item, first_row,
            WIDTH, ROW_STRIDE, BLOCK_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BLOCK, FLAT, PRECISION,
        )  # fmt: skip
    elif bias is not None:
        _compose_item(
            value, gate, bias, bias_out, factor, WIDTH, item - items, first_row,
            WIDTH, 0, BIAS_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BIAS_BLOCK, False, PRECISION,
        )  # fmt: skip


@triton.jit
def _one_pass_items(
    grad, value, gate, pool, pool_grad, partials, factor, size, first_item, end_item, step_item,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * STEP
    base = first + tl.arange(0, STEP)
    row = tl.arange(0, ROWS)
    alpha = tl.trans(_coefficients(value, gate, factor, 0, first, BLOCKS, E, ROWS, STEP))
    dalpha = tl.zeros([ROWS, STEP], dtype=tl.float32)
    for item in tl.range(first_item, end_item, step_item, num_stages=2):
        entry, place, inside = _entries(item, size, WIDTH, ROW_STRIDE, BLOCK, FLAT)
        composed, there = _composed(grad, 0, place, inside, WIDTH, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
        dblocks = tl.load(composed, mask=there, other=0.0)
        source, known = _matrices(pool, first, entry, inside, size, E, STEP)
        matrix = tl.load(source, mask=known, other=0.0)
        dpool = _product(alpha, dblocks, tl.zeros([STEP, BLOCK], dtype=tl.float32), PRECISION)
        target, _ = _matrices(pool_grad, first, entry, inside, size, E, STEP)
        tl.store(target, dpool.to(pool_grad.dtype.element_ty), mask=known)
        # Tensor cores round sums towards zero, so the items' sums are added outside.
        dalpha += _product(dblocks, tl.trans(matrix), tl.zeros([ROWS, STEP], dtype=tl.float32), PRECISION)
    partial = partials + (tl.program_id(0).to(tl.int64) * PATHS * BLOCKS + row[:, None]) * E + base[None, :]
    tl.store(partial, dalpha * factor, mask=(row < PATHS * BLOCKS)[:, None] & (base < E)[None, :])


@triton.jit
def one_pass_backward(
    grad, bias_grad, value, gate, pool, bias, pool_grad, bias_pool_grad, partials, factor, size, items, programs,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin()
    program = tl.program_id(0)
    if program < programs:
        _one_pass_items(
            grad, value, gate, pool, pool_grad, partials, factor, size, program, items, programs,
            WIDTH, ROW_STRIDE, BLOCK_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BLOCK, FLAT, PRECISION,
        )  # fmt: skip
    elif bias is not None:
        item = program - programs
        _one_pass_items(
            bias_grad, value, gate, bias, bias_pool_grad, partials, factor, WIDTH, item, item + 1, 1,
            WIDTH, 0, BIAS_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BIAS_BLOCK, False, PRECISION,
        )  # fmt: skip


@triton.jit
def _pool_item(
    grad, value, gate, pool_grad, factor, size, item, first,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    entry, place, inside = _entries(item, size, WIDTH, ROW_STRIDE, BLOCK, FLAT)
    total = tl.zeros([STEP, BLOCK], dtype=tl.float32)
    for first_row in range(0, PATHS * BLOCKS, ROWS):
        alpha = tl.trans(_coefficients(value, gate, factor, first_row, first, BLOCKS, E, ROWS, STEP))
        composed, there = _composed(grad, first_row, place, inside, WIDTH, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
        dblocks = tl.load(composed, mask=there, other=0.0)
        total = _product(alpha, dblocks, total, PRECISION)
    target, known = _matrices(pool_grad, first, entry, inside, size, E, STEP)
    tl.store(target, total.to(pool_grad.dtype.element_ty), mask=known)


@triton.jit
def pool_backward(
    grad, bias_grad, value, gate, pool_grad, bias_pool_grad, factor, size, items,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one item of the pool or of its biases."""
    begin()
    program = tl.program_id(0)
    tiles: tl.constexpr = (E + STEP - 1) // STEP
    first = program % tiles * STEP
    item = program // tiles
    if item < items:
        _pool_item(
            grad, value, gate, pool_grad, factor, size, item, first,
            WIDTH, ROW_STRIDE, BLOCK_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BLOCK, FLAT, PRECISION,
        )  # fmt: skip
    elif bias_grad is not None:
        _pool_item(
            bias_grad, value, gate, bias_pool_grad, factor, WIDTH, item - items, first,
            WIDTH, 0, BIAS_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BIAS_BLOCK, False, PRECISION,
        )  # fmt: skip


@triton.jit
def _coefficient_items(
    grad, pool, partial, factor, size, first_item, end_item, step_item, first_row, first,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([ROWS, STEP], dtype=tl.float32)
    for item in tl.range(first_item, end_item, step_item, num_stages=2):
        entry, place, inside = _entries(item, size, WIDTH, ROW_STRIDE, BLOCK, FLAT)
        composed, there = _composed(grad, first_row, place, inside, WIDTH, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
        dblocks = tl.load(composed, mask=there, other=0.0)
        source, known = _matrices(pool, first, entry, inside, size, E, STEP)
        matrix = tl.load(source, mask=known, other=0.0)
        total += _product(dblocks, tl.trans(matrix), tl.zeros([ROWS, STEP], dtype=tl.float32), PRECISION)
    row, base = first_row + tl.arange(0, ROWS), first + tl.arange(0, STEP)
    place = partial + row[:, None] * E + base[None, :]
    tl.store(place, total * factor, mask=(row < PATHS * BLOCKS)[:, None] & (base < E)[None, :])


@triton.jit
def coefficients_backward(
    grad, bias_grad, pool, bias, partials, factor, size, items, programs,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a partial sum of one tile of the coefficients' gradient, over some items or one item of the biases."""
    begin()
    program = tl.program_id(0)
    row_tiles: tl.constexpr = (PATHS * BLOCKS + ROWS - 1) // ROWS
    base_tiles: tl.constexpr = (E + STEP - 1) // STEP
    first = program % base_tiles * STEP
    first_row = program // base_tiles % row_tiles * ROWS
    number = program // (base_tiles * row_tiles)
    partial = partials + number.to(tl.int64) * PATHS * BLOCKS * E
    if number < programs:
        _coefficient_items(
            grad, pool, partial, factor, size, number, items, programs, first_row, first,
            WIDTH, ROW_STRIDE, BLOCK_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BLOCK, FLAT, PRECISION,
        )  # fmt: skip
    elif bias is not None:
        _coefficient_items(
            bias_grad, bias, partial, factor, WIDTH, number - programs, number - programs + 1, 1, first_row, first,
            WIDTH, 0, BIAS_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BIAS_BLOCK, False, PRECISION,
        )  # fmt: skip


@triton.jit
def _few_bases_item(
    grad, value, gate, pool, pool_grad, partials, factor, size, item,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute both gradients in one pass over the blocks' gradient: all rows of an item, a tile of rows at a time."""
    entry, place, inside = _entries(item, size, WIDTH, ROW_STRIDE, BLOCK, FLAT)
    matrices, totals = (), ()
    for base in tl.static_range(E):
        source, known = _matrices(pool, base, entry, inside, size, E, 1)
        matrices += (tl.load(source, mask=known, other=0.0).to(tl.float32),)
        totals += (tl.zeros([1, BLOCK], dtype=tl.float32),)
    for first_row in tl.range(0, PATHS * BLOCKS, ROWS, num_stages=3):
        composed, there = _composed(grad, first_row, place, inside, WIDTH, BLOCK_STRIDE, BLOCKS, PATHS, ROWS)
        dblocks = tl.load(composed, mask=there, other=0.0).to(tl.float32)
        row = first_row + tl.arange(0, ROWS)
        partial = partials + (tl.program_id(0).to(tl.int64) * PATHS * BLOCKS + row) * E
        sums = ()
        for base in tl.static_range(E):
            alpha = _coefficients(value, gate, factor, first_row, base, BLOCKS, E, ROWS, 1)
            sums += (totals[base] + tl.sum(alpha * dblocks, 0)[None, :],)
            dalpha = tl.sum(dblocks * matrices[base], 1)
            tl.store(partial + base, dalpha * factor, mask=row < PATHS * BLOCKS)
        totals = sums
    for base in tl.static_range(E):
        target, known = _matrices(pool_grad, base, entry, inside, size, E, 1)
        tl.store(target, totals[base].to(pool_grad.dtype.element_ty), mask=known)


@triton.jit
def few_bases_backward(
    grad, bias_grad, value, gate, pool, bias, pool_grad, bias_pool_grad, partials, factor, size, items,
    WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, PATHS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin()
    item = tl.program_id(0)
    if item < items:
        _few_bases_item(
            grad, value, gate, pool, pool_grad, partials, factor, size, item,
            WIDTH, ROW_STRIDE, BLOCK_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BLOCK, FLAT, PRECISION,
        )  # fmt: skip
    elif bias is not None:
        _few_bases_item(
            bias_grad, value, gate, bias, bias_pool_grad, partials, factor, WIDTH, item - items,
            WIDTH, 0, BIAS_STRIDE, BLOCKS, PATHS, E, ROWS, STEP, BIAS_BLOCK, False, PRECISION,
        )  # fmt: skip
