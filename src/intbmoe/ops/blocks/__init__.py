"""K composed blocks: everything that happens to a token between the router and the combine."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The tensors of K blocks of L internal layers; tuples hold one entry per internal layer."""

    weights: tuple[Any, ...]  # (K, d_{l−1}, P·d_l), value path and, if P = 2, gate path: tensors or ``Pooled``
    biases: tuple[Tensor, ...]  # (K, P·d_l)
    gains: tuple[Tensor, ...]  # (d_l,) gains of the gate's norm; empty without a gate or without its norm
    scale: Tensor | None  # λ, shape (1,); None without a gate
    norms: tuple[tuple[Tensor, Tensor], ...]  # LayerNorms' weights and biases between internal layers, or empty
    token_filter: Tensor | None  # W_x (d, d), the filter's map of the token; None without a filter
    block_filter: Tensor | None  # (K, d), the filter's term W_c c + b of each block; None without a filter
    scales: tuple[Tensor, ...] = ()  # (K, 1, P·d_l) if weights are int8, which only ``native`` supports; else empty
    gate_shifts: tuple[Tensor, ...] = ()  # (d_l,) if the gate's norm is a LayerNorm; empty if it is the RMSNorm
    has_kernels: bool = True  # whether these are the paper's blocks, the only ones with kernels and compiled code
