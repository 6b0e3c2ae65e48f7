"""Launch a Triton kernel without the work that Triton repeats at every launch, and early if the GPU can.

``kernel[grid](…)`` binds names, describes every argument and builds a string as the key of the compiled kernel, which
takes longer than a small kernel runs. Here the compiled kernel is found by what Triton specialises on: types, whether
addresses and integers are multiples of 16, integers that are one, and the constants.
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from intbmoe.ops.backend import INTERPRETING
from intbmoe.ops.triton_support import capability

_compiled: dict[tuple, tuple[Any, tuple]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run ``kernel[grid](*arguments, **constants)`` on the arguments' device; only constants are passed by name."""
    if INTERPRETING:
        kernel[grid](*arguments, **constants)
        return
    first = arguments[0]
    device = (first if isinstance(first, Tensor) else first.base).get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **constants)
        return
    key = (id(kernel), device, *[_kind(argument) for argument in arguments], *constants.items())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants, **_options(device))
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = compiled, tuple(constants[name] for name in names)
        return
    compiled, rest = found
    compiled[(*grid, 1, 1)[:3]](*arguments, *rest)


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >> 31
    if argument is None or isinstance(argument, float):
        return type(argument)
    return argument.base.dtype, tuple(argument.block_shape)  # a tensor descriptor


@cache
def _options(device: int) -> dict[str, bool]:
    """Options of every launch; kernels overlap only where this has been tried (``overlap.py``)."""
    overlaps = capability(device)[0] == 9 and os.environ.get("INTBMOE_OVERLAP") != "0"
    return {"launch_pdl": True} if overlaps else {}
