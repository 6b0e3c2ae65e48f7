"""Composition and its gradients as one matrix product each: all paths of all blocks are the rows of a matrix."""

from torch import Tensor


def product(coefficients: Tensor, pool: Tensor) -> Tensor:
    """Coefficients (P, K, E) and a pool (E, i, o) → composed (K, i, P·o), paths side by side."""
    paths, blocks, bases = coefficients.shape
    merged = coefficients.reshape(-1, bases) @ pool.reshape(bases, -1)
    merged = merged.view(paths, blocks, *pool.shape[1:])
    return merged.movedim(0, -2).reshape(blocks, pool.shape[1], paths * pool.shape[2])


def gradients(grad: Tensor, coefficients: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of coefficients and pool, given that of ``product``; they can be differentiated again."""
    paths, blocks, bases = coefficients.shape
    rows = grad.reshape(blocks, pool.shape[1], paths, pool.shape[2]).movedim(-2, 0).reshape(paths * blocks, -1)
    pool_grad = coefficients.reshape(-1, bases).t() @ rows
    return (rows @ pool.reshape(bases, -1).t()).view_as(coefficients), pool_grad.view_as(pool)
