"""When Triton's kernels can run, and what they share on the host's side.

Triton is optional: torch's CUDA builds bring it along, and without it every operation has a plain form. On the CPU its
kernels run only in Triton's interpreter (``TRITON_INTERPRET=1``), which is how they are tested where there is no GPU.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor

INSTALLED = find_spec("triton") is not None
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Read once, as Triton itself does when it meets a kernel."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16
"""Bytes that a row's start must be a multiple of: the grouped GEMM reads so many at once."""


def runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels run on ``device``, and are to: an exported program must not need them."""
    if not INSTALLED or torch.compiler.is_exporting():
        return False
    return device.type == "cuda" or (INTERPRETING and device.type == "cpu")


def usable(x: Tensor) -> bool:
    """Whether Triton's kernels run on numbers like those of ``x``."""
    return x.dtype in DTYPES and runs_on(x.device)


def on_device(x: Tensor) -> AbstractContextManager:
    """A context in which kernels start on the device of ``x``."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def aligned(width: int, dtype: torch.dtype) -> int:
    """``width`` rounded up to a multiple of ``ALIGNMENT`` bytes."""
    unit = ALIGNMENT // dtype.itemsize
    return -(-width // unit) * unit


def empty_rows(like: Tensor, rows: int, width: int) -> Tensor:
    """(rows, width) uninitialised, rows starting at multiples of ``ALIGNMENT`` bytes whatever the width."""
    return like.new_empty_strided((rows, width), (aligned(width, like.dtype), 1))


def empty_matrices(like: Tensor, count: int, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """(count, rows, width) uninitialised, likewise."""
    stride = aligned(width, dtype or like.dtype)
    return like.new_empty_strided((count, rows, width), (rows * stride, stride, 1), dtype=dtype or like.dtype)


def power_of_2(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``number`` and ``least``."""
    return max(1 << max(number - 1, 0).bit_length(), least)
