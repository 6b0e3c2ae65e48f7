"""One call of the compiled library: tokens, their routing, and the blocks or experts that they go through."""

import ctypes
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from intbmoe.ops.native import LIBRARY, address
from intbmoe.precision import cast

Network = Literal["block", "gelu", "swiglu"]
NETWORKS: tuple[Network, ...] = ("block", "gelu", "swiglu")  # in the order of native.c


class _Problem(ctypes.Structure):
    """The struct ``Problem`` of ``native.c``, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "choices", "blocks", "layers", "threads", "is_double")),
        ("network", ctypes.c_int64),
        ("widths", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("token_term", "block_term", "ids", "route_weights", "shared")),
        ("shared_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weights", "biases", "gains", "norm_gains", "norm_shifts")),
        *((name, ctypes.c_void_p) for name in ("scales", "scale", "y", "load", "scratch")),
        *((name, ctypes.c_void_p) for name in ("token", "row_of", "end", "rows")),
        *((name, ctypes.c_int64) for name in ("most_inner", "most_columns", "rows_at_once")),
    )


def run(
    network: Network,
    widths: Sequence[int],
    x: Tensor,
    ids: Tensor,
    route_weights: Tensor,
    lists: dict[str, Sequence[Tensor]],
    single: dict[str, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """(N, d) tokens, (N, k) where they go (−1: nowhere) and with which weights → (N, d) sums, and loads.

    ``lists`` are the fields of ``Problem`` with a tensor for each layer, ``single`` those with one or none. With
    "scales" in ``lists``, one for each of the weights, the weights are int8.
    """
    dtype, (tokens, dim), count = x.dtype, x.shape, lists["weights"][0].shape[0]
    held = []  # keeps what the addresses point to alive until the call is over

    def at(tensor: Tensor, dtype: torch.dtype = dtype) -> int:
        held.append(tensor := cast(tensor, dtype).contiguous())
        return address(tensor, dtype)

    ids, route_weights = ids.contiguous(), route_weights.contiguous()
    y, load = x.new_empty(tokens, dim), x.new_empty(count, dtype=torch.int64)
    problem = _Problem(
        tokens, ids.shape[1], count, len(widths) - 1, torch.get_num_threads(), dtype.itemsize == 8,
        NETWORKS.index(network),
    )  # fmt: skip
    stored = torch.int8 if lists.get("scales") else dtype
    arrays = {
        name: (ctypes.c_void_p * len(tensors))(*(at(each, stored if name == "weights" else dtype) for each in tensors))
        for name, tensors in lists.items()
        if tensors
    }
    arrays["widths"] = (ctypes.c_int64 * len(widths))(*widths)
    for name, array in arrays.items():
        setattr(problem, name, ctypes.addressof(array))
    for name, tensor in single.items():
        if tensor is not None:
            setattr(problem, name, at(tensor))
    x = x if x.stride(1) == 1 else x.contiguous()
    problem.x, problem.x_stride, problem.shared_stride = address(x, dtype), x.stride(0), dim
    problem.ids, problem.route_weights = address(ids, torch.int64), address(route_weights, dtype)
    problem.y, problem.load = address(y, dtype), address(load, torch.int64)
    reference = ctypes.byref(problem)
    scratch = x.new_empty(LIBRARY.intbmoe_scratch_bytes(reference), dtype=torch.uint8)
    problem.scratch = address(scratch, torch.uint8)
    LIBRARY.intbmoe_run_blocks(reference)
    return y, load
