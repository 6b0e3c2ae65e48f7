"""The specification: each group's rows times that group's matrix, one group after another."""

import torch
from torch import Tensor


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """(M, i) rows sorted by group, (G, i, o) weights, (G,) end offsets → (M, o); zero after the last group."""
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    parts = [x[start:end] @ weight[group] for group, (start, end) in enumerate(zip(starts, ends, strict=True))]
    tail = x.new_zeros(x.shape[0] - ends[-1], weight.shape[2])
    return torch.cat([*parts, tail])
