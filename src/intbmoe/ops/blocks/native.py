"""Blocks without gradients on the CPU, from tokens to weighted sums in one call of the compiled library."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from intbmoe.ops.blocks import Blocks
from intbmoe.ops.native import LIBRARY, address
from intbmoe.precision import cast, linear


class _Problem(ctypes.Structure):
    """``Problem`` of ``native.c``, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "choices", "blocks", "layers", "threads", "is_double")),
        ("widths", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("token_term", "block_term", "ids", "route_weights", "shared")),
        ("shared_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weights", "biases", "gains", "norm_gains", "norm_shifts")),
        *((name, ctypes.c_void_p) for name in ("scale", "y", "load", "scratch")),
        *((name, ctypes.c_void_p) for name in ("token", "row_of", "end", "rows")),
        *((name, ctypes.c_int64) for name in ("most_inner", "most_columns", "rows_at_once")),
    )


def run_blocks(x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """(N, d) tokens, (N, k) their blocks (−1: none) and weights → (N, d) sums plus ``shared``, and loads (K,)."""
    dtype, (tokens, dim), count = x.dtype, x.shape, blocks.weights[0].shape[0]
    held = []  # what the addresses point to must live until the call is over

    def at(tensor: Tensor) -> int:
        held.append(tensor := tensor.contiguous())
        return address(tensor, dtype)

    def all_at(tensors: Sequence[Tensor]) -> ctypes.Array:
        return (ctypes.c_void_p * len(blocks.weights))(*[at(cast(tensor, dtype)) for tensor in tensors])

    paths = 1 if blocks.scale is None else 2
    widths = [dim, *[weight.shape[2] // paths for weight in blocks.weights]]
    ids = ids.contiguous()
    y, load = x.new_empty(tokens, dim), x.new_empty(count, dtype=torch.int64)
    problem = _Problem(tokens, ids.shape[1], count, len(blocks.weights), torch.get_num_threads(), dtype.itemsize == 8)
    pointers = {
        "widths": (ctypes.c_int64 * len(widths))(*widths),
        "weights": all_at(blocks.weights),
        "biases": all_at(blocks.biases),
        "gains": all_at(blocks.gains),
        "norm_gains": all_at([gain for gain, _ in blocks.norms]),
        "norm_shifts": all_at([shift for _, shift in blocks.norms]),
    }
    for name, array in pointers.items():
        setattr(problem, name, ctypes.addressof(array))
    x = x if x.stride(1) == 1 else x.contiguous()
    problem.x, problem.x_stride = address(x, dtype), x.stride(0)
    problem.ids, problem.route_weights = address(ids, torch.int64), at(weights)
    if blocks.token_filter is not None:
        problem.token_term = at(linear(x, blocks.token_filter))
        problem.block_term = at(cast(blocks.block_filter, dtype))
    if shared is not None:
        problem.shared, problem.shared_stride = at(shared), dim
    if blocks.scale is not None:
        problem.scale = at(cast(blocks.scale, dtype))
    problem.y, problem.load = address(y, dtype), address(load, torch.int64)
    reference = ctypes.byref(problem)
    scratch = x.new_empty(LIBRARY.intbmoe_scratch_bytes(reference), dtype=torch.uint8)
    problem.scratch = address(scratch, torch.uint8)
    LIBRARY.intbmoe_run_blocks(reference)
    return y, load
