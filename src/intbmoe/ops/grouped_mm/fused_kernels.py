"""The Triton kernels of ``fused.py``, which imports this file only to launch one, because Triton is optional.

Letters: ``M`` rows sorted by group, ``G`` groups, ``i`` inputs, ``o`` outputs; a tile is ``BLOCK_M`` rows of one group.

**Slots.** Group g, whose rows are [start, end), owns the tile slots ⌊start/B⌋ + g … ⌊end/B⌋ + g, B = BLOCK_M. These
intervals do not overlap and each is long enough, as ⌈(end − start)/B⌉ ≤ ⌊end/B⌋ − ⌊start/B⌋ + 1. So ⌊M/B⌋ + G slots
hold any routing, and one more interval holds the rows without a group. A program finds its group by counting the
intervals before its slot, without a scan over the groups or a copy to the host. At most G + 1 slots stay empty; their
loops run no steps.

**Alignment.** Triton knows of an integer argument only whether 16 divides it, and loads element by element if it does
not: a width of 2844 would be slow. ``UNIT`` tells it more: a power of two that divides every width and stride of the
tensors accessed through pointers. A tensor descriptor needs no such help: it takes any width of aligned rows. So if
both factors have one, an odd number of inputs does not slow down the writing of the results.

**Descriptors.** With ``X_TMA`` or ``W_TMA``, ``x`` or ``weight`` is a tensor descriptor instead of a pointer. The copy
engine of compute capability 9.0 reads it in whole tiles, with zeros outside the tensor.
"""

import triton
import triton.language as tl

from intbmoe.ops.overlap import begin


@triton.jit
def _rows_of_slot(offsets, slot, rows, groups, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Slot → its group (``groups`` for rows without one), its first row, and the end of the group's rows."""
    index = tl.arange(0, GROUPS)
    exists = index < groups
    ends = tl.load(offsets + index, mask=exists, other=0)
    before = exists & (ends // BLOCK_M + index < slot)
    group = tl.sum(before.to(tl.int32), axis=0)
    start = tl.max(tl.where(before, ends, 0), axis=0)
    end = tl.min(tl.where(exists & (index >= group), ends, rows), axis=0)
    first = start + (slot - start // BLOCK_M - group) * BLOCK_M
    return group, first, end


@triton.jit
def swizzle(tile, tiles_m, tiles_n, SWIZZLE: tl.constexpr):
    """Tile number → (m, n), ``SWIZZLE`` tiles down before the next column: neighbours in time share L2 lines."""
    band = SWIZZLE * tiles_n
    first = tile // band * SWIZZLE
    height = tl.minimum(tiles_m - first, SWIZZLE)
    return first + tile % band % height, tile % band // height


@triton.jit(do_not_specialize=["rows", "groups", "slots"])  # their values do not change the generated code
def mm(
    x,  # (M, i), rows contiguous
    weight,  # (G, i, o), any strides; as a descriptor (G, i, o), or (G, o, i) if W_TRANSPOSED
    out,  # (M, o), rows contiguous
    offsets,  # (G,) int32 ends
    rows, groups, inputs, outputs, x_stride, w_stride_g, w_stride_i, w_stride_o, out_stride, slots,
    UNIT: tl.constexpr, GROUPS: tl.constexpr, X_TMA: tl.constexpr, W_TMA: tl.constexpr, W_TRANSPOSED: tl.constexpr,
    EVEN_I: tl.constexpr, EVEN_O: tl.constexpr, COMPLETE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWIZZLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r] @ weight[g(r)]; rows without a group are zero or, with COMPLETE, left as they are."""
    begin()
    if not (X_TMA and W_TMA):
        inputs = inputs // UNIT * UNIT
    outputs = outputs // UNIT * UNIT
    x_stride = x_stride // UNIT * UNIT
    w_stride_g = w_stride_g // UNIT * UNIT
    out_stride = out_stride // UNIT * UNIT
    if W_TRANSPOSED:
        w_stride_o = w_stride_o // UNIT * UNIT
    else:
        w_stride_i = w_stride_i // UNIT * UNIT
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    steps = tl.cdiv(inputs, BLOCK_K)
    step_k = tl.arange(0, BLOCK_K)

    slot, tile_n = swizzle(tl.program_id(0), slots, tiles_n, SWIZZLE)
    group, first, end = _rows_of_slot(offsets, slot, rows, groups, GROUPS, BLOCK_M)
    if COMPLETE:
        end = tl.where(group < groups, end, 0)
    row = first + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the group's end are computed from arbitrary rows and not stored.
    source = tl.minimum(row, rows - 1).to(tl.int64)
    known = tl.minimum(group, groups - 1)
    if not X_TMA:
        x_row = x + source[:, None] * x_stride
    if not W_TMA:
        w_column = weight + known.to(tl.int64) * w_stride_g + column[None, :] * w_stride_o
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.where((first < end) & (group < groups), steps, 0)):
        k = step * BLOCK_K + step_k
        if X_TMA:
            a = x.load([first, step * BLOCK_K])
        elif EVEN_I:
            a = tl.load(x_row + k[None, :])
        else:
            a = tl.load(x_row + k[None, :], mask=k[None, :] < inputs, other=0)
        if W_TMA:
            if W_TRANSPOSED:
                b = weight.load([known, tile_n * BLOCK_N, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b = weight.load([known, step * BLOCK_K, tile_n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
        else:
            b_at = w_column + k[:, None] * w_stride_i
            if EVEN_I and EVEN_O:
                b = tl.load(b_at)
            elif EVEN_I:
                b = tl.load(b_at, mask=column[None, :] < outputs, other=0)
            elif EVEN_O:
                b = tl.load(b_at, mask=k[:, None] < inputs, other=0)
            else:
                b = tl.load(b_at, mask=(k[:, None] < inputs) & (column[None, :] < outputs), other=0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if EVEN_O:
        tl.store(at, total.to(out.dtype.element_ty), mask=row[:, None] < end)
    else:
        inside = (row[:, None] < end) & (column[None, :] < outputs)
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _product(
    x, weight, group, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr, W_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the tile of ``mm`` that starts at ``row`` and ``column``, from descriptors."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        a = x.load([row, step * BLOCK_K])
        if W_TRANSPOSED:
            b = weight.load([group, column, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = weight.load([group, step * BLOCK_K, column]).reshape(BLOCK_K, BLOCK_N)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["groups"])
def mm_through(
    x,  # (M, i), a descriptor
    weight, narrow,  # (G, i, o), or (G, o, i) if W_TRANSPOSED, descriptors of BLOCK_N and of NARROW outputs
    out, written,  # (M, o), rows contiguous; the same as a descriptor
    offsets,  # (G,) int32 ends, the last M
    groups, outputs, out_stride,
    UNIT: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr, W_TRANSPOSED: tl.constexpr, NARROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``mm`` by persistent programs, which loop over tiles. All tiles take the same number of steps.

    That lets Triton merge the loops over tiles and steps (``flatten``): the next tile's loads start before this tile's
    results are written. A descriptor writes the results, in halves, to leave more shared memory for the loads. It
    writes whole tiles, so a group's last tile ends where the group ends; the rows that it shares with the tile before
    get the same numbers from both. Groups shorter than a tile come last, in narrow tiles that are written row by row;
    programs that had fewer tiles before are the first to get them.
    """
    begin()
    outputs = outputs // UNIT * UNIT
    out_stride = out_stride // UNIT * UNIT
    program, programs = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, GROUPS)
    end = tl.load(offsets + index, mask=index < groups, other=0)
    start = tl.load(offsets + index - 1, mask=(index > 0) & (index < groups), other=0)
    tiles = tl.where(end - start >= BLOCK_M, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(tiles, 0)
    tiles_m, tiles_n = tl.sum(tiles), tl.cdiv(outputs, BLOCK_N)
    for tile in tl.range(program, tiles_m * tiles_n, programs, flatten=True):
        tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, SWIZZLE)
        group = tl.sum((last <= tile_m).to(tl.int32))
        first = tl.minimum(start + (tile_m - last + tiles) * BLOCK_M, end - BLOCK_M)
        row, column = tl.sum(tl.where(index == group, first, 0)), tile_n * BLOCK_N
        total = _product(x, weight, group, row, column, BLOCK_M, BLOCK_N, BLOCK_K, STEPS, W_TRANSPOSED, PRECISION)
        left, right = total.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        written.store([row, column], left.to(out.dtype.element_ty))
        written.store([row, column + BLOCK_N // 2], right.to(out.dtype.element_ty))
    short = ((end > start) & (tiles == 0)).to(tl.int32)
    last = tl.cumsum(short, 0)
    narrow_n = tl.cdiv(outputs, NARROW)
    turn = (programs + program - tiles_m * tiles_n % programs) % programs
    for tile in range(turn, tl.sum(short) * narrow_n, programs):
        group = tl.sum((last <= tile // narrow_n).to(tl.int32))
        row, column = tl.sum(tl.where(index == group, start, 0)), tile % narrow_n * NARROW
        total = _product(x, narrow, group, row, column, BLOCK_M, NARROW, BLOCK_K, STEPS, W_TRANSPOSED, PRECISION)
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, NARROW)
        inside = (rows < tl.sum(tl.where(index == group, end, 0)))[:, None] & (columns < outputs)[None, :]
        at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile(
    source, row, column, first_row, first_column, end_row, width, stride,
    TMA: tl.constexpr, EVEN: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """A tile of (·, width) ``source``; with EDGE it holds the last rows, and rows from ``end_row`` on are zero."""
    if TMA:
        value = source.load([first_row, first_column])
        if EDGE:  # later rows are not this group's and may hold any value, so they are replaced, not multiplied by 0
            inside = (first_row + tl.arange(0, value.shape[0]) < end_row)[:, None]
            value = tl.where(inside, value, tl.zeros_like(value))
    else:
        at = source + row.to(tl.int64)[:, None] * stride + column[None, :]
        if EDGE:
            inside = (first_row + tl.arange(0, row.shape[0]) < end_row)[:, None]
            value = tl.load(at, mask=inside & (column[None, :] < width), other=0)
        elif EVEN:
            value = tl.load(at)
        else:
            value = tl.load(at, mask=column[None, :] < width, other=0)
    return value


@triton.jit
def outer(
    x,  # (M, i), rows contiguous
    grad,  # (M, o), rows contiguous
    out,  # (SPLITS, G, i, o), rows contiguous, the other dimensions without gaps
    offsets,  # (G,) int32 ends
    inputs, outputs, x_stride, grad_stride, out_stride,
    UNIT: tl.constexpr, X_TMA: tl.constexpr, GRAD_TMA: tl.constexpr, EVEN_I: tl.constexpr, EVEN_O: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,  # of the inputs, the outputs, the rows
    SWIZZLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[s, g] = Σ over the s-th part of group g's rows of x[r] ⊗ grad[r]; zero for a part without rows."""
    begin()
    if not (X_TMA and GRAD_TMA):
        inputs = inputs // UNIT * UNIT
    outputs = outputs // UNIT * UNIT
    x_stride = x_stride // UNIT * UNIT
    grad_stride = grad_stride // UNIT * UNIT
    out_stride = out_stride // UNIT * UNIT
    tile_i, tile_o = swizzle(tl.program_id(0), tl.cdiv(inputs, BLOCK_M), tl.cdiv(outputs, BLOCK_N), SWIZZLE)
    split, group = tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets + group)
    part = tl.cdiv(tl.cdiv(end - start, BLOCK_K), SPLITS) * BLOCK_K
    start = tl.minimum(start + split * part, end)
    end = tl.minimum(start + part, end)
    first_i, first_o = tile_i * BLOCK_M, tile_o * BLOCK_N
    i, o = first_i + tl.arange(0, BLOCK_M), first_o + tl.arange(0, BLOCK_N)
    whole = start + (end - start) // BLOCK_K * BLOCK_K

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(start, whole, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        a = _tile(x, row, i, first, first_i, end, inputs, x_stride, X_TMA, EVEN_I, False)
        b = _tile(grad, row, o, first, first_o, end, outputs, grad_stride, GRAD_TMA, EVEN_O, False)
        total = tl.dot(a.T, b, total, input_precision=PRECISION)
    if whole < end:
        row = whole + tl.arange(0, BLOCK_K)
        a = _tile(x, row, i, whole, first_i, end, inputs, x_stride, X_TMA, EVEN_I, True)
        b = _tile(grad, row, o, whole, first_o, end, outputs, grad_stride, GRAD_TMA, EVEN_O, True)
        total = tl.dot(a.T, b, total, input_precision=PRECISION)
    matrix = (split * tl.num_programs(2) + group).to(tl.int64) * inputs
    at = out + (matrix + i)[:, None] * out_stride + o[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(i[:, None] < inputs) & (o[None, :] < outputs))


@triton.jit
def sum_parts(parts, out, size, used, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add (SPLITS, size) parts into the first ``used`` entries of ``out``, in the same order every time."""
    begin()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in tl.static_range(SPLITS):
        total += tl.load(parts + at, mask=at < used, other=0)
        parts += size
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < used)
