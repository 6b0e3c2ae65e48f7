"""The stable sort of assignments by group: which row each assignment gets, and where each group ends."""

from typing import NamedTuple

import torch
from torch import Tensor

from intbmoe.ops.backend import Backend


class Permutation(NamedTuple):
    """M = N·k assignments sorted by group, keeping their order within a group; those without a group come last."""

    token: Tensor  # (M,) the token of each row
    choice: Tensor  # (M,) the assignment of each row: its index in the flattened (N, k) choices
    inverse: Tensor  # (N, k) the row of each assignment; one past the last row if it was left out
    group: Tensor  # (M,) the group of each row; G if it has none
    ends: Tensor  # (G,) int32, where each group's rows end
    counts: Tensor  # (G,) how many rows each group has
    backend: Backend  # the backend of all that follows
    complete: bool = False  # whether every row is known to have a group, so that none follows the last group
    trimmed: bool = False  # whether assignments without a group have been left out


def permute(ids: Tensor, groups: int, backend: Backend, complete: bool = False) -> Permutation:
    """The same as ``naive.permute``; ``complete`` says that no id is −1."""
    if backend == "fused":
        from intbmoe.ops.permute import fused

        return Permutation(*fused.permute(ids, groups), backend, complete)
    return Permutation(*sort(ids, groups, complete), backend, complete)


def sort(ids: Tensor, groups: int, complete: bool = False) -> tuple[Tensor, ...]:
    """The same as ``naive.permute``, by torch's stable sort."""
    tokens, k = ids.shape
    keys = ids.reshape(-1)
    group, choice = (keys if complete else torch.where(keys < 0, groups, keys)).sort(stable=True)
    rows = torch.arange(tokens * k, device=ids.device)
    inverse = torch.empty_like(choice).scatter(0, choice, rows).view(tokens, k)
    bounds = torch.searchsorted(group, torch.arange(groups + 1, device=ids.device), out_int32=True)
    token = torch.div(choice, k, rounding_mode="floor")
    return token, choice, inverse, group, bounds[1:], bounds.diff().long()
