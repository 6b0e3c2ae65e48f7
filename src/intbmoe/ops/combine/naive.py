"""The specification: every token sums its rows, one after another."""

import torch
from torch import Tensor


def combine(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """(M, c) rows, (N, k) weights, (N, k) the row of each choice (M: none) → (N, c), in the type of ``weights``."""
    y = []
    for token_weights, token_rows in zip(weights, inverse.tolist(), strict=True):
        total = rows.new_zeros(rows.shape[1], dtype=weights.dtype)
        for weight, row in zip(token_weights, token_rows, strict=True):
            if row < len(rows):
                total = total + weight * rows[row].to(weights.dtype)
        y.append(total)
    return torch.stack(y) if y else rows.new_zeros(0, rows.shape[1], dtype=weights.dtype)
