"""Sorting by counting, in two Triton kernels: no comparison sort, no wait for the device, the same order every time.

The first kernel counts each program's assignments by group. In the second, every program sums the counts of the
programs before it, which gives the row of its first assignment of each group, and ranks its own assignments from there.
The number of steps grows with the square of the number of programs, so many tiles are divided among a few hundred
programs. If one program is enough, there is only one kernel.
"""

import torch
import triton
import triton.language as tl

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.overlap import begin
from intbmoe.ops.triton_support import ceil_div, power_of_2

ENTRIES = 4096
"""Entries of a tile's membership matrix: assignments times groups. Measured on an H200."""
MOST_PROGRAMS = 256


@triton.jit
def _members(ids, first, total, TILE: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """Return a tile's assignments, their groups (``GROUPS`` if none), which exist, and (TILE, PADDED) memberships."""
    place = first + tl.arange(0, TILE)
    there = place < total
    group = tl.load(ids + place, mask=there, other=-1).to(tl.int32)
    group = tl.where((group < 0) | (group > GROUPS), GROUPS, group)
    member = (group[:, None] == tl.arange(0, PADDED)[None, :]) & there[:, None]
    return place, group, there, member.to(tl.int32)


@triton.jit
def _counted(ids, total, parts, TILE: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """Return (PADDED,) how many of a program's assignments each group has."""
    count = tl.zeros([PADDED], dtype=tl.int32)
    for part in range(parts):
        first = (tl.program_id(0) * parts + part) * TILE
        _, _, _, member = _members(ids, first, total, TILE, GROUPS, PADDED)
        count += tl.sum(member, 0)
    return count


@triton.jit
def _count(ids, counts, total, parts, TILE: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    begin()
    count = _counted(ids, total, parts, TILE, GROUPS, PADDED)
    tl.store(counts + tl.program_id(0) * PADDED + tl.arange(0, PADDED), count)


@triton.jit
def _place(
    ids, counts, token, choice, inverse, groups_of_rows, ends, sizes, total, parts, programs, k,
    TILE: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the permutation; ``counts`` is None if there is a single program."""
    begin()
    column = tl.arange(0, PADDED)
    before = tl.zeros([PADDED], dtype=tl.int32)
    if counts is None:
        overall = _counted(ids, total, parts, TILE, GROUPS, PADDED)
    else:
        overall = tl.zeros([PADDED], dtype=tl.int32)
        for first in range(0, programs, CHUNK):
            row = first + tl.arange(0, CHUNK)
            count = tl.load(counts + row[:, None] * PADDED + column[None, :], mask=(row < programs)[:, None], other=0)
            overall += tl.sum(count, 0)
            before += tl.sum(tl.where((row < tl.program_id(0))[:, None], count, 0), 0)
    end = tl.cumsum(overall, 0)
    if tl.program_id(0) == 0:
        tl.store(ends + column, end, mask=column < GROUPS)
        tl.store(sizes + column, overall.to(tl.int64), mask=column < GROUPS)
    start = end - overall + before
    for part in range(parts):
        first = (tl.program_id(0) * parts + part) * TILE
        place, group, there, member = _members(ids, first, total, TILE, GROUPS, PADDED)
        rank = tl.sum((start[None, :] + tl.cumsum(member, 0) - 1) * member, 1).to(tl.int64)
        tl.store(inverse + place, rank, mask=there)
        tl.store(choice + rank, place.to(tl.int64), mask=there)
        tl.store(token + rank, (place // k).to(tl.int64), mask=there)
        tl.store(groups_of_rows + rank, group.to(tl.int64), mask=there)
        start += tl.sum(member, 0)


def _run(ids, groups):
    outputs = _allocate(ids, groups)
    total = ids.numel()
    if total == 0:
        outputs[4].zero_()
        outputs[5].zero_()
        return outputs
    padded = power_of_2(groups + 1, 2)
    tile = max(16, ENTRIES // padded)
    parts = ceil_div(ceil_div(total, tile), MOST_PROGRAMS)
    programs = ceil_div(total, tile * parts)
    ids = ids.contiguous()
    counts = None
    sizes = {"TILE": tile, "GROUPS": groups, "PADDED": padded}
    if programs > 1:
        counts = ids.new_empty(programs, padded, dtype=torch.int32)
        launch(_count, (programs,), ids, counts, total, parts, **sizes)
    chunk = max(2, 4096 // padded)
    launch(_place, (programs,), ids, counts, *outputs, total, parts, programs, ids.shape[1], CHUNK=chunk, **sizes)
    return outputs


def _allocate(ids, groups: int):
    rows = ids.new_empty(ids.numel(), dtype=torch.int64)
    inverse = ids.new_empty(ids.shape, dtype=torch.int64)
    ends = ids.new_empty(groups, dtype=torch.int32)
    counts = ids.new_empty(groups, dtype=torch.int64)
    return rows, torch.empty_like(rows), inverse, torch.empty_like(rows), ends, counts


# The same as ``naive.permute``.
permute = define("permute", schema_of(_allocate, 6), _run, _allocate)
