"""The specification. ``last`` is the end of the last group; later rows are left out."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gather(x: Tensor, token: Tensor, last: int) -> Tensor:
    """(N, c) values of tokens → those of the first ``last`` rows."""
    return x[token[:last]]


def activate(rows: Tensor, bias: Tensor, group: Tensor, last: int, gelu: bool) -> Tensor:
    """(M, c) rows, (G, c) biases and each row's group → rows plus bias, and GELU of that if asked for."""
    shifted = rows[:last] + bias[group[:last]]
    return F.gelu(shifted) if gelu else shifted


def gate(gates: Tensor, values: Tensor, last: int) -> Tensor:
    """SiLU(gates) ⊙ values."""
    return F.silu(gates[:last]) * values[:last]


def add(first: Tensor, second: Tensor, last: int) -> Tensor:
    return torch.add(first[:last], second[:last])
