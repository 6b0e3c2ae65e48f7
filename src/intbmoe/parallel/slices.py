"""Cutting parameters: each rank keeps a slice of them, and DDP leaves them alone."""

from collections.abc import Set as AbstractSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def share_out(module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    """Keep of the module's own parameters this rank's slice along ``dim``, as DTensors of the same names, in place.

    Every rank has the same whole, and nothing is sent. Slices are as large as DTensor's: the last ranks may have less,
    or nothing.
    """
    from torch.distributed.tensor import DTensor, Shard  # takes a second, which a run of one process need not spend

    rank, ranks = mesh.get_local_rank(), mesh.size()
    for name, parameter in list(module.named_parameters(recurse=False)):
        own = parameter.detach()[(slice(None),) * dim + (slice_of(rank, ranks, parameter.shape[dim]),)]
        # Only the slice goes to the mesh's device, in memory of its own, or the whole would stay with it.
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
        raise ValueError(f"mesh has {mesh.ndim} dimensions: {what} are cut over one, take mesh['name of it']")


def leave_out_of_ddp(model: nn.Module, parameters: AbstractSet[nn.Parameter]) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter in parameters]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
