"""Running sums that the compiler does not fuse with what comes before.

Inductor fuses the input of a ``cumsum`` into its scan, and fails if that input is a product of tensors of different
shapes and the scan is long ("Unexpected tiling", and pytorch/pytorch#180221). In eager mode the scan reads a stored
tensor too, so in code compiled for a GPU the sum is a separate operation. Elsewhere it is torch's, with all its
derivatives, and an exported program keeps the ``cumsum`` that every runtime has.
"""

import torch
from torch import Tensor

from intbmoe.ops.eager import compiled_for_gpu

torch.library.define("intbmoe::running_sum", "(Tensor x, int dim) -> Tensor")


def running_sum(x: Tensor, dim: int) -> Tensor:
    """The same as ``x.cumsum(dim)``."""
    return torch.ops.intbmoe.running_sum(x, dim) if compiled_for_gpu(x) else x.cumsum(dim)


@torch.library.impl("intbmoe::running_sum", "default")
def _run(x, dim):
    return x.cumsum(dim).contiguous()


@torch.library.register_fake("intbmoe::running_sum")
def _allocate(x, dim):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    ctx.dim = inputs[1]


def _differentiate(ctx, grad):
    return torch.ops.intbmoe.running_sum(grad.flip(ctx.dim), ctx.dim).flip(ctx.dim), None


torch.library.register_autograd("intbmoe::running_sum", _differentiate, setup_context=_save)
