"""Sorting by counting, in two Triton kernels: no comparison sort, no wait for the device, the same order every time.

The first kernel counts each tile's assignments by group. In the second every program adds up the counts of the tiles
before its own, which gives the row of its first assignment of each group, and ranks its own assignments behind it.
"""

import torch
import triton
import triton.language as tl

from intbmoe.ops.launch import launch
from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.triton_support import ceil_div, power_of_2

ENTRIES = 8192
"""Entries of a tile's membership matrix: assignments times groups."""


@triton.jit
def _members(ids, total, TILE: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """A tile's assignments, their groups (``GROUPS`` for none), which are there, and the (TILE, PADDED) memberships."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = place < total
    group = tl.load(ids + place, mask=there, other=-1).to(tl.int32)
    group = tl.where((group < 0) | (group > GROUPS), GROUPS, group)
    member = (group[:, None] == tl.arange(0, PADDED)[None, :]) & there[:, None]
    return place, group, there, member.to(tl.int32)


@triton.jit
def _count(ids, counts, total, TILE: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    _, _, _, member = _members(ids, total, TILE, GROUPS, PADDED)
    tl.store(counts + tl.program_id(0) * PADDED + tl.arange(0, PADDED), tl.sum(member, 0))


@triton.jit
def _place(
    ids, counts, token, choice, inverse, groups_of_rows, ends, sizes, total, tiles, k,
    TILE: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    place, group, there, member = _members(ids, total, TILE, GROUPS, PADDED)
    column = tl.arange(0, PADDED)
    before = tl.zeros([PADDED], dtype=tl.int32)
    overall = tl.zeros([PADDED], dtype=tl.int32)
    for first in range(0, tiles, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        count = tl.load(counts + tile[:, None] * PADDED + column[None, :], mask=(tile < tiles)[:, None], other=0)
        overall += tl.sum(count, 0)
        before += tl.sum(tl.where((tile < tl.program_id(0))[:, None], count, 0), 0)
    end = tl.cumsum(overall, 0)
    if tl.program_id(0) == 0:
        tl.store(ends + column, end, mask=column < GROUPS)
        tl.store(sizes + column, overall.to(tl.int64), mask=column < GROUPS)
    start = end - overall + before
    rank = tl.sum((start[None, :] + tl.cumsum(member, 0) - 1) * member, 1).to(tl.int64)
    tl.store(inverse + place, rank, mask=there)
    tl.store(choice + rank, place.to(tl.int64), mask=there)
    tl.store(token + rank, (place // k).to(tl.int64), mask=there)
    tl.store(groups_of_rows + rank, group.to(tl.int64), mask=there)


def _run(ids, groups):
    outputs = _allocate(ids, groups)
    total = ids.numel()
    if total == 0:
        outputs[4].zero_()
        outputs[5].zero_()
        return outputs
    padded = power_of_2(groups + 1, 2)
    tile = max(16, ENTRIES // padded)
    tiles = ceil_div(total, tile)
    ids = ids.contiguous()
    counts = ids.new_empty(tiles, padded, dtype=torch.int32)
    sizes = {"TILE": tile, "GROUPS": groups, "PADDED": padded}
    launch(_count, (tiles,), ids, counts, total, **sizes)
    chunk = max(2, 4096 // padded)
    launch(_place, (tiles,), ids, counts, *outputs, total, tiles, ids.shape[1], CHUNK=chunk, **sizes)
    return outputs


def _allocate(ids, groups: int):
    rows = ids.new_empty(ids.numel(), dtype=torch.int64)
    inverse = ids.new_empty(ids.shape, dtype=torch.int64)
    ends = ids.new_empty(groups, dtype=torch.int32)
    counts = ids.new_empty(groups, dtype=torch.int64)
    return rows, torch.empty_like(rows), inverse, torch.empty_like(rows), ends, counts


# As ``naive.permute``.
permute = define("permute", schema_of(_allocate, 6), _run, _allocate)
