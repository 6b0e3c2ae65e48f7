"""Composition and its gradients in the compiled library: one pass over the pool and the blocks in either direction."""

import ctypes

import torch
from torch import Tensor

from intbmoe.ops.compose import plain
from intbmoe.ops.eager import plain_numbers, recorded
from intbmoe.ops.native import DTYPES, LIBRARY, address

NARROWEST, MOST_ROWS = 32, 128
"""The fewest columns of a base, and the most bases and most blocks times paths, that the library takes. With more rows,
and with more coefficients than the next, there is so much to multiply that torch is as fast."""
MOST_COEFFICIENTS = 4096
MOST_CHUNKS, FEWEST_ENTRIES = 64, 4096
"""Chunks of lines that are summed apart for the coefficients' gradient, and entries of a base in a chunk. They do not
depend on the number of threads, so the gradient does not either."""


class _Composition(ctypes.Structure):
    """The struct ``Composition`` of ``native.c``, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("paths", "blocks", "bases", "lines", "width", "chunks")),
        *((name, ctypes.c_int64) for name in ("threads", "is_double")),
        *((name, ctypes.c_void_p) for name in ("coefficients", "pool", "composed", "pool_grad", "sums")),
    )


def suits(coefficients: Tensor, pool: Tensor) -> bool:
    """Whether the library can take these tensors, unless their operations are being recorded."""
    # In this order: a compiler understands the first condition, and must not see the rest.
    if not (plain_numbers(pool) and plain_numbers(coefficients)) or LIBRARY is None:
        return False
    paths, blocks, bases = coefficients.shape
    few = max(paths * blocks, bases) <= MOST_ROWS and coefficients.numel() <= MOST_COEFFICIENTS
    known = pool.dtype in DTYPES and coefficients.dtype == pool.dtype and pool.is_contiguous()
    return few and known and pool.shape[1] > 0 and pool.shape[2] >= NARROWEST


def _describe(coefficients: Tensor, pool: Tensor, composed: Tensor) -> _Composition:
    (bases, lines, width), blocks = pool.shape, composed.shape[0]
    paths = coefficients.numel() // (blocks * bases)
    chunks = max(1, min(lines, MOST_CHUNKS, lines * width // FEWEST_ENTRIES))
    threads = min(chunks, torch.get_num_threads())
    return _Composition(
        paths, blocks, bases, lines, width, chunks, threads, pool.dtype.itemsize == 8,
        *(address(each, pool.dtype) for each in (coefficients, pool, composed)),
    )  # fmt: skip


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, coefficients, pool):
        ctx.save_for_backward(coefficients, pool)  # also if plain torch composes: checkpointing compares what is saved
        if recorded():
            return plain.product(coefficients, pool)
        (paths, blocks, _), (_, lines, width) = coefficients.shape, pool.shape
        composed = pool.new_empty(blocks, lines, paths * width)
        coefficients = coefficients.contiguous()
        LIBRARY.intbmoe_compose(ctypes.byref(_describe(coefficients, pool, composed)))
        return composed

    @staticmethod
    def backward(ctx, grad):
        coefficients, pool = ctx.saved_tensors
        # What was saved may come back in another form (saved_tensors_hooks). With gradients, for second derivatives.
        fit = plain_numbers(grad) and suits(coefficients, pool) and not recorded()
        if torch.is_grad_enabled() or not fit:
            return plain.gradients(grad, coefficients, pool)
        return gradients(grad, coefficients, pool, ctx.needs_input_grad)


product = _Compose.apply


def gradients(
    grad: Tensor, coefficients: Tensor, pool: Tensor, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """The same as ``plain.gradients``, for tensors that the library ``suits``."""
    turned, grad = coefficients.movedim(2, 0).contiguous(), grad.contiguous()
    problem = _describe(turned, pool, grad)
    sums = pool.new_empty(problem.chunks, *coefficients.shape) if needed[0] else None
    pool_grad = torch.empty_like(pool) if needed[1] else None
    problem.sums = None if sums is None else address(sums, pool.dtype)
    problem.pool_grad = None if pool_grad is None else address(pool_grad, pool.dtype)
    LIBRARY.intbmoe_compose_backward(ctypes.byref(problem))
    return None if sums is None else sums[0].clone(), pool_grad
