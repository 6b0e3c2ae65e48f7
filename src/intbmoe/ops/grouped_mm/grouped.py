"""torch's grouped GEMM as a custom op.

``F.grouped_mm`` in float32 on the CPU can be neither compiled nor exported, leaves the rows after the last group
uninitialised, and needs row strides that are multiples of 16 bytes. On Blackwell GPUs, the weight gradients of empty
groups are arbitrary (https://github.com/pytorch/pytorch/issues/172439). This op is opaque to compilers, zeroes those
rows and gradients, and copies tensors with other strides.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.grouped_mm import operations
from intbmoe.ops.triton_support import ALIGNMENT, capability, empty_matrices, empty_rows


def _run_mm(x: Tensor, weight: Tensor, offsets: Tensor, complete: bool) -> Tensor:
    out = F.grouped_mm(_aligned_rows(x), _aligned_weight(weight), offs=offsets)
    if not complete:
        tail = torch.arange(out.shape[0], device=out.device) >= offsets[-1]
        out.masked_fill_(tail.unsqueeze(1), 0)
    return out


def _run_outer(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    out = F.grouped_mm(_aligned_rows(x).t(), _aligned_rows(grad), offs=offsets)
    if x.is_cuda and capability(x.device) >= (10, 0):
        out.masked_fill_((offsets.diff(prepend=offsets.new_zeros(1)) == 0)[:, None, None], 0)
    return out


grouped_mm, grouped_outer = operations.define("grouped_mm", "grouped_outer", _run_mm, _run_outer)


def _aligned_rows(x: Tensor) -> Tensor:
    """Return ``x`` (M, i) with rows that start at multiples of 16 bytes; the same tensor if they already do."""
    if x.stride(1) == 1 and _aligned(x, 0):
        return x
    return empty_rows(x, *x.shape).copy_(x)


def _aligned_weight(weight: Tensor) -> Tensor:
    """Return ``weight`` (G, i, o), row- or column-major, with rows aligned in the same way."""
    row_major = weight.stride(2) == 1 and _aligned(weight, 1)
    column_major = weight.stride(1) == 1 and _aligned(weight, 2)
    if _aligned(weight, 0) and (row_major or column_major):
        return weight
    return empty_matrices(weight, *weight.shape).copy_(weight)


def _aligned(x: Tensor, dim: int) -> bool:
    return x.stride(dim) * x.element_size() % ALIGNMENT == 0
