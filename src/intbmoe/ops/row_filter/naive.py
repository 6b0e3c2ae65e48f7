"""The specification: every row takes its token, and what its token and its block say of it."""

from torch import Tensor


def filter_rows(x: Tensor, token_term: Tensor, block_term: Tensor, token: Tensor, group: Tensor) -> Tensor:
    """(N, d) tokens, (N, d) W_x x, (G, d) W_c c + b, (M,) token and group of each row → (M, d)."""
    return x[token] * (token_term[token] + block_term[group]).sigmoid()
