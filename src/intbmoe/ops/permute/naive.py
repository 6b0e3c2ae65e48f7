"""The specification: each assignment in turn is appended to its group's list."""

import torch
from torch import Tensor


def permute(ids: Tensor, groups: int) -> tuple[Tensor, ...]:
    """``ids`` (N, k), −1 for no group → the tensors of ``Permutation``."""
    k = ids.shape[1]
    members = [[] for _ in range(groups + 1)]
    for choice, group in enumerate(ids.reshape(-1).tolist()):
        members[group].append(choice)  # −1, for none, selects the last list
    rows = [choice for group in members for choice in group]
    group = [index for index, group in enumerate(members) for _ in group]
    choice = torch.tensor(rows, dtype=torch.int64)
    inverse = torch.empty_like(choice)
    inverse[choice] = torch.arange(len(rows))
    counts = torch.tensor([len(group) for group in members[:-1]], dtype=torch.int64)
    ends = counts.cumsum(0).int()
    return choice // k, choice, inverse.view(-1, k), torch.tensor(group, dtype=torch.int64), ends, counts
