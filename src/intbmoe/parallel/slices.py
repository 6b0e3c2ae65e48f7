"""Shard parameters: each rank keeps a slice of them, and DDP ignores them."""

from collections.abc import Set as AbstractSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def share_out(module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    """Keep this rank's slice along ``dim`` of the module's own parameters, as DTensors of the same names, in place.

    Every rank starts with equal whole parameters, so nothing is sent. Slices have DTensor's sizes: the last ranks may
    have less, or nothing.
    """
    from torch.distributed.tensor import DTensor, Shard  # importing takes a second that a single process can save

    rank, ranks = mesh.get_local_rank(), mesh.size()
    for name, parameter in list(module.named_parameters(recurse=False)):
        own = parameter.detach()[(slice(None),) * dim + (slice_of(rank, ranks, parameter.shape[dim]),)]
        # Only the slice goes to the mesh's device, in its own memory; otherwise the whole parameter would be kept.
        device = own.device if own.device.type == mesh.device_type else mesh.device_type
        own = own.to(device, copy=True, memory_format=torch.contiguous_format)
        whole = {"shape": parameter.shape, "stride": parameter.stride()}
        part = DTensor.from_local(own, mesh, [Shard(dim)], run_check=False, **whole)
        setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def slice_of(rank: int, ranks: int, width: int) -> slice:
    each = -(-width // ranks)
    return slice(min(rank * each, width), min((rank + 1) * each, width))


def size_of(rank: int, ranks: int, width: int) -> int:
    own = slice_of(rank, ranks, width)
    return own.stop - own.start


def require_one_dimension(mesh: DeviceMesh, what: str) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions: {what} are sharded over one, pass mesh['its name']")


def leave_out_of_ddp(model: nn.Module, parameters: AbstractSet[nn.Parameter]) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter in parameters]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
