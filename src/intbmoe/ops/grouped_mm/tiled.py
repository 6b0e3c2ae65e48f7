"""Plain torch, any floating type, static shapes: for float64, for export, and where there is no grouped kernel.

The rows are cut into tiles of ``M // G + 2`` rows, each with rows of one group. A group of n rows needs ⌈n / tile⌉
tiles, so 2G tiles are enough for any routing: the work is at most twice the minimum, and no shape depends on the data.
"""

import torch
from torch import Tensor


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The same as ``naive.grouped_mm``, by one batched product over 2G tiles."""
    rows, groups = x.shape[0], weight.shape[0]
    size = rows // groups + 2  # at least 2, so that an exporter never has to ask whether it is 1
    ends = offsets.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    starts = ends - counts
    tiles = (counts + size - 1) // size
    last_tile = tiles.cumsum(0)
    first_tile = last_tile - tiles

    # Which row is at each place of each tile; places past the group's end are empty.
    tile = torch.arange(2 * groups, device=x.device)
    owner = torch.searchsorted(last_tile, tile, right=True).clamp(max=groups - 1)
    place = starts[owner] + (tile - first_tile[owner]) * size
    place = place.unsqueeze(1) + torch.arange(size, device=x.device)
    filled = (place < ends[owner].unsqueeze(1)) & (tile < last_tile[-1]).unsqueeze(1)
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    product = torch.bmm(padded[torch.where(filled, place, rows)], weight[owner])

    # And back: row r of group g is at place r − starts[g] of g's tiles; rows after the last group read a zero row.
    row = torch.arange(rows, device=x.device)
    group = torch.searchsorted(ends, row, right=True)
    known = group.clamp(max=groups - 1)
    back = torch.where(group < groups, first_tile[known] * size + row - starts[known], 2 * groups * size)
    flat = product.reshape(2 * groups * size, weight.shape[2])
    return torch.cat([flat, flat.new_zeros(1, weight.shape[2])])[back]
