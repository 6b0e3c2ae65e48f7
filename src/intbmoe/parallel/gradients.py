"""Norm and clipping over gradients that may be whole or sharded."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from intbmoe.layer import local


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm over all entries of gradients that may be sharded, each entry counted once; one small all-reduce.

    With sharded gradients all ranks must call this together.
    """
    sharded: dict[dist.ProcessGroup, list[Tensor]] = {}
    replicated = []
    for gradient in gradients:
        if any(placement.is_shard() for placement in getattr(gradient, "placements", ())):
            sharded.setdefault(gradient.device_mesh.get_group(), []).append(local(gradient))
        else:
            replicated.append(local(gradient))
    norms = [torch.nn.utils.get_total_norm(replicated)] if replicated else []
    for group, slices in sharded.items():
        square = torch.nn.utils.get_total_norm(slices).square()
        dist.all_reduce(square, group=group)
        norms.append(square.sqrt())
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0] if norms else torch.zeros(())


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Like ``torch.nn.utils.clip_grad_norm_``, for any mix of whole and sharded parameters; returns the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(gradients)
    if gradients:
        scale_to(gradients, max_norm, norm)
    return norm


def scale_to(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of norm ``norm`` down to ``max_norm``, with torch's own formula."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(gradient) for gradient in gradients], factor.to(gradients[0].device))
