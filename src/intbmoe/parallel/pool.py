"""Pools that are sharded over ranks along their entries.

A composed block is a weighted sum over the E bases, entry by entry. So rank r keeps the entries (E, i_r, o) of every
base, composes its slice (K, i_r, P·o) of all blocks, and one all-gather completes them (K, i, P·o). Backward is one
reduce-scatter of their gradient. The amount sent depends on K, but not on E, on the tokens or on their values.

Gradients fit data parallelism that averages over ranks (FSDP2, DDP). With G the sum over ranks of the gradients of the
composed blocks, a slice of the pool gets 1/R of its part of G, which is the final average. Coefficients, which all
ranks have, get on each rank the contribution of its slice times R. FSDP2 or DDP then averages everything before them
over ranks, which gives the sum of all slices' contributions. No extra message is needed.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.ops.backend import Backend
from intbmoe.ops.compose import Coefficients, compose
from intbmoe.parallel.slices import leave_out_of_ddp, require_one_dimension, share_out, size_of
from intbmoe.parts.pool import Pool
from intbmoe.precision import wide

collectives = torch.ops._c10d_functional  # their Python functions were renamed between versions of torch

How = tuple[Literal["weights", "biases"], torch.dtype, Backend]
"""What is composed from a pool, in which type, and by which backend."""


def shard_pools(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep only this rank's slice of every pool, in place; all ranks call it, with equal weights, before training.

    ``mesh`` has one dimension, over which the ranks have different tokens. Parameters keep their names and become
    DTensors, so an optimizer made afterwards has state only for its slice. The number of ranks need not divide the
    width.
    """
    require_one_dimension(mesh, "pools")
    why = why_not_shared(model)
    if why is not None:
        raise ValueError(f"{why}; use FSDP2 or DDP")
    for name, layer in _layers(model):
        if isinstance(layer.pools[0], ShardedPool):
            raise ValueError(f"{name}: its pools are already sharded: call shard_pools once")
        for pool in layer.pools:
            pool.__class__ = ShardedPool
            pool.share_out(mesh)
        layer.register_forward_pre_hook(_drop_composed)
        layer.register_forward_hook(_stop_dropping, always_call=True)
    leave_out_of_ddp(model, pool_parameters(model))


def why_not_shared(model: nn.Module) -> str | None:
    """Why the model has no pools that can be sharded; None if it has."""
    layers = _layers(model)
    if not layers:
        return f"{type(model).__name__} holds no IntBMoE, so it has no pools to shard"
    for name, layer in layers:
        if layer.config.conditioning_dim:
            return (
                f"{name} has conditioning_dim={layer.config.conditioning_dim}: each rank composes a slice of all "
                f"ranks' blocks, so all ranks would need the same conditioning"
            )
    return None


def _layers(model: nn.Module) -> list[tuple[str, IntBMoE]]:
    return [(name or "the model", layer) for name, layer in moe_layers(model) if isinstance(layer, IntBMoE)]


def pool_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of all sharded pools, which FSDP2 must ignore (``ignored_params``)."""
    return {parameter for pool in _sharded(model) for parameter in pool.parameters()}


def set_requires_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Like FSDP2's method of this name: set False before a step's micro-batches, and True before the last of them.

    Until the last one, pools keep their composed blocks and add up their gradients, so a step gathers and scatters
    once. With ``layer.recompute`` nothing is kept: every micro-batch gathers twice and scatters once.
    """
    for pool in _sharded(model):
        pool.sync = sync


def abandon_step(model: nn.Module) -> None:
    """Discard the gradients of the micro-batches so far, if the step will not be finished."""
    for pool in _sharded(model):
        pool.kept.clear()


def _sharded(model: nn.Module) -> list["ShardedPool"]:
    return [module for module in model.modules() if isinstance(module, ShardedPool)]


class ShardedPool(Pool):
    """A pool of which this rank holds a slice, including biases; ``shard_pools`` makes it from a ``Pool``."""

    def share_out(self, mesh: DeviceMesh) -> None:
        self.group, self.sync = mesh.get_group(), True
        self.kept: dict[How, _Composition] = {}  # of the step's micro-batches, until the last one
        self.awaited: list[_Composition] = []  # of this forward; their blocks are dropped at its end
        share_out(self, mesh, dim=1)

    @_disable_dynamo  # like torch.compiler.disable, which would import the compiler right here
    def forward(
        self, alpha: Coefficients, dtype: torch.dtype, backend: Backend, recompute: bool
    ) -> tuple[Tensor, Tensor]:
        how = "weights", dtype, backend
        weights = self._gathered(how, alpha, self.weight.to_local(), self.weight.shape[1], recompute)
        return weights, self._biases(alpha, backend)

    def _biases(self, alpha: Coefficients, backend: Backend) -> Tensor:
        if self.bias is None:
            return super()._biases(alpha, backend)
        # As a pool with one column, whose entries are the second dimension, as in weights. There is no kernel for it.
        own = self.bias.to_local().unsqueeze(2)
        how = "biases", wide(own).dtype, "naive" if backend == "naive" else "tiled"
        blocks = self._gathered(how, alpha, own, self.bias.shape[1], recompute=False)
        return blocks.transpose(1, 2).flatten(1).contiguous()

    def _gathered(self, how: How, alpha: Coefficients, own: Tensor, width: int, recompute: bool) -> Tensor:
        """The K blocks (K, i, P·o) from all ranks' slices; this rank's slice is ``own`` (E, i_r, o)."""
        learned = any(tensor is not None and tensor.requires_grad for tensor in (alpha.value, alpha.gate, own))
        if not (torch.is_grad_enabled() and learned):
            return _Composition(self, how, alpha, own, width, drops=False).blocks()
        composition = self._kept(how, own)
        if composition is None:
            composition = _Composition(self, how, alpha, own, width, drops=recompute)
            if recompute:
                self.awaited.append(composition)
            elif not self.sync:
                self.kept[how] = composition
        blocks = _Compose.apply(composition, alpha.value, alpha.gate, own)
        if self.sync and not recompute and how not in self.kept:
            composition.hand_over()
        return blocks

    def _kept(self, how: How, own: Tensor) -> "_Composition | None":
        """The composition from the step's earlier micro-batches, if there were any."""
        found = self.kept.get(how)
        if found is None or found.version == own._version:
            return found
        if found.grad is not None:
            raise RuntimeError(
                "the pool was changed while gradients of micro-batches were kept for the step's last one: call "
                "intbmoe.parallel.set_requires_gradient_sync(model, True) before the last one, or abandon_step(model)"
            )
        return self.kept.pop(how) and None


class _Composition:
    """K blocks composed from the ranks' slices: whole on every rank, or dropped until they are needed again."""

    def __init__(self, pool: ShardedPool, how: How, alpha: Coefficients, own: Tensor, width: int, drops: bool) -> None:
        self.pool, self.width, self.drops, self.version = pool, width, drops, own._version
        self.grad: Tensor | None = None  # the blocks' gradient, from micro-batches before the last
        learns = torch.is_grad_enabled()
        self.inputs = [
            None if tensor is None else tensor.detach().requires_grad_(learns and tensor.requires_grad)
            for tensor in (alpha.value, alpha.gate, own)
        ]
        _, dtype, backend = how
        self.how = alpha.factor, dtype, backend if own.numel() else "tiled"
        self._own: Tensor | None = None  # this rank's slice of the blocks, with its graph, which holds only inputs
        self._blocks: Tensor | None = None

    def blocks(self) -> Tensor:
        if self._blocks is None:
            self._own = self._compose()
            self._blocks = _gather(self._own.detach(), self.width, self.pool.group)
        return self._blocks

    def _compose(self) -> Tensor:
        value, gate, own = self.inputs
        factor, *how = self.how
        # Keep outer saved-tensor hooks (activation checkpointing) out: there is nothing for them to save here.
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return compose(Coefficients(value, gate, factor), own, *how)

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the blocks, or a view of them."""
        blocks = self._blocks
        return blocks is not None and blocks.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()

    def hand_over(self) -> None:
        """Drop our reference to the blocks, so that activation checkpointing can free them."""
        self._blocks = None

    def drop(self) -> None:
        self._own = self._blocks = None

    def collect(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of coefficients and slice from all micro-batches; None before the last micro-batch."""
        if not (self.drops or self.pool.sync):
            self.grad = wide(grad) + (0 if self.grad is None else self.grad)
            return (None, None, None)
        if self.grad is not None:
            grad, self.grad = (self.grad + grad).to(grad.dtype), None
        self.pool.kept = {key: kept for key, kept in self.pool.kept.items() if kept is not self}
        ranks = dist.get_world_size(self.pool.group)
        own = _scatter(grad, self.pool.group, self.inputs[2].shape[1]).div_(ranks)
        needed = [tensor for tensor in self.inputs if tensor is not None and tensor.requires_grad]
        composed = self._compose() if self._own is None else self._own
        self.drop()
        found = iter(torch.autograd.grad(composed, needed, own))
        value, gate, slices = (
            next(found) if tensor is not None and tensor.requires_grad else None for tensor in self.inputs
        )
        return (*(None if path is None else path * ranks for path in (value, gate)), slices)


class _Compose(Function):
    @staticmethod
    def forward(ctx: Any, composition: _Composition, value: Tensor, gate: Tensor | None, own: Tensor) -> Tensor:
        ctx.composition = composition
        return composition.blocks().detach()  # a separate tensor for each micro-batch's graph, in the same memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.composition.collect(grad))


def _gather(own: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's (K, i_r, c) → all ranks' (K, i, c). The slices of the last ranks may be smaller, or empty."""
    ranks = dist.get_world_size(group)
    each = -(-width // ranks)
    if own.shape[1] < each:
        own = nn.functional.pad(own, (0, 0, 0, each - own.shape[1]))
    slices = collectives.wait_tensor(collectives.all_gather_into_tensor(own.contiguous(), ranks, group.group_name))
    slices = slices.unflatten(0, (ranks, -1))
    return torch.cat([slices[rank, :, : size_of(rank, ranks, width)] for rank in range(ranks)], dim=1)


def _scatter(grad: Tensor, group: dist.ProcessGroup, own: int) -> Tensor:
    """(K, i, c) → this rank's ``own`` = i_r rows of the sum over ranks."""
    ranks, width = dist.get_world_size(group), grad.shape[1]
    each = -(-width // ranks)
    if width < ranks * each:
        grad = nn.functional.pad(grad, (0, 0, 0, ranks * each - width))
    slices = grad.unflatten(1, (ranks, each)).movedim(1, 0).flatten(0, 1)
    mine = collectives.wait_tensor(collectives.reduce_scatter_tensor(slices, "sum", ranks, group.group_name))
    return mine[:, :own].contiguous()


# ``layer.recompute``: autograd keeps the composition instead of the blocks, and recomputes them in backward.


def _drop_composed(layer: IntBMoE, _: Any) -> None:
    layer._dropping = None
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if not layer.recompute or not torch.is_grad_enabled() or outer:
        return  # activation checkpointing around the layer drops its blocks anyway

    def pack(tensor: Tensor) -> Any:
        for pool in layer.pools:
            for composition in pool.awaited:
                if composition.holds(tensor):
                    return composition, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        composition, *view = kept
        return composition.blocks().as_strided(*view)

    layer._dropping = saved_tensors_hooks(pack, unpack)
    layer._dropping.__enter__()


def _stop_dropping(layer: IntBMoE, *_: Any) -> None:
    if layer._dropping is not None:
        layer._dropping.__exit__()
        layer._dropping = None
    for pool in layer.pools:
        for composition in pool.awaited:
            composition.drop()
        pool.awaited.clear()
