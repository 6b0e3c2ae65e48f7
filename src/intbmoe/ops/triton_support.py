"""What Triton's kernels need on the host; this module itself does not need Triton."""

from functools import cache

import torch
from torch import Tensor

ALIGNMENT = 16  # a row must start at a multiple of this many bytes: the grouped GEMM reads that many at once


def in_rows(x: Tensor) -> Tensor:
    """Return ``x`` (M, c) with contiguous rows; the same tensor if they already are."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def aligned(width: int, dtype: torch.dtype) -> int:
    """``width`` rounded up to a multiple of ``ALIGNMENT`` bytes."""
    unit = ALIGNMENT // dtype.itemsize
    return -(-width // unit) * unit


def empty_rows(like: Tensor, rows: int, width: int) -> Tensor:
    """(rows, width) uninitialised, with rows that start at multiples of ``ALIGNMENT`` bytes whatever the width."""
    return like.new_empty_strided((rows, width), (aligned(width, like.dtype), 1))


def empty_matrices(like: Tensor, count: int, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """(count, rows, width) uninitialised, with rows aligned in the same way."""
    stride = aligned(width, dtype or like.dtype)
    return like.new_empty_strided((count, rows, width), (rows * stride, stride, 1), dtype=dtype or like.dtype)


def power_of_2(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``number`` and ``least``."""
    return max(1 << max(number - 1, 0).bit_length(), least)


def ceil_div(number: int, size: int) -> int:
    """Return ``number / size`` rounded up; Triton's own function takes longer on the host than a launch."""
    return -(-number // size)


@cache
def capability(device: torch.device | int) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; 2 in the interpreter, so that tests have both few and many programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program may have; in the interpreter, those of an H200."""
    if device.type != "cuda":
        return 232_448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
