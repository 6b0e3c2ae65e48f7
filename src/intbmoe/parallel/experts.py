"""Expert parallelism: each rank holds some experts whole, and tokens are sent to them and back.

Rank r keeps ⌈E/R⌉ experts of every stack, and the last ranks what is left. In a forward each rank sorts its own tokens
by expert, tells the others how many rows to expect for each of their experts, sends the rows (all-to-all), and gets the
outputs back in the same way; weights and sums stay with the tokens. Backward sends the gradients of both. A method
makes all its decisions, including capacity and losses, before any row is sent, so nothing else about it changes.

Gradients fit data parallelism that averages over ranks. An expert sees the rows of all ranks, so its gradient is their
sum; it is divided by R before it is added to ``.grad``, which makes it the final average.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import Function, once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from intbmoe.layer import moe_layers
from intbmoe.ops.backend import Backend
from intbmoe.parallel.slices import leave_out_of_ddp, require_one_dimension, share_out, size_of, slice_of
from intbmoe.parts.dispatch import dispatch, from_rows, to_rows
from intbmoe.parts.experts import StackedExperts, StackedLinear


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts in every layer, in place; all ranks call it, with equal weights, before training.

    ``mesh`` has one dimension, over which the ranks have different tokens. Parameters keep their names and become
    DTensors, so an optimizer made afterwards has state only for this rank's experts. The number of ranks need not
    divide the number of experts. Layers of methods that do not send tokens to experts stay whole, like the rest of the
    model; a model with only such layers is refused.
    """
    require_one_dimension(mesh, "experts")
    layers = dict(moe_layers(model))
    stacks = {name: layer.experts for name, layer in layers.items() if "experts" not in layer.REFUSES}
    if not stacks:
        found = {type(layer).__name__: layer.REFUSES["experts"] for layer in layers.values()}
        why = "; ".join(f"{name}: {reason}" for name, reason in found.items()) or "it holds no MoE layer"
        raise ValueError(f"{type(model).__name__} has no experts to shard ({why})")
    for name, experts in stacks.items():
        if experts.exchange is not None:
            raise ValueError(f"{name or 'the model'}: its experts are already sharded: call shard_experts once")
        for linear in experts.children():
            linear.__class__ = ShardedLinear
            linear.share_out(mesh)
        experts.exchange = _Exchange(mesh, experts.count)
    leave_out_of_ddp(model, expert_parameters(model))


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of all sharded experts, which FSDP2 must ignore (``ignored_params``)."""
    stacks = (module for module in model.modules() if isinstance(module, StackedExperts))
    return {parameter for experts in stacks if experts.exchange is not None for parameter in experts.parameters()}


class ShardedLinear(StackedLinear):
    """Stacked maps of which this rank holds some; ``shard_experts`` makes it from a ``StackedLinear``."""

    def share_out(self, mesh: DeviceMesh) -> None:
        self.ranks = mesh.size()
        share_out(self, mesh, dim=0)

    def held(self) -> tuple[Tensor, Tensor | None]:
        return self._own(self.weight), None if self.bias is None else self._own(self.bias)

    def _own(self, parameter: Tensor) -> Tensor:
        own = parameter.to_local()
        if own.requires_grad:  # not a hook on the parameter, which is lost if ``model.to`` replaces the parameter
            own.register_hook(lambda grad: grad / self.ranks)
        return own


class _Exchange:
    """Sends the rows of one layer to the ranks that hold their experts, and the outputs back."""

    def __init__(self, mesh: DeviceMesh, experts: int) -> None:
        self.group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.held = [size_of(other, ranks, experts) for other in range(ranks)]  # experts of each rank
        self.own = slice_of(rank, ranks, experts)
        self.count = self.held[rank]

    @_disable_dynamo  # like torch.compiler.disable, which would import the compiler right here
    def __call__(self, experts: StackedExperts, rows: Tensor, counts: Tensor, backend: Backend) -> Tensor:
        """(M, d) rows sorted by expert, (E,) rows per expert → outputs (M, d); zero for rows without an expert."""
        coming = _send(counts, self.held, [self.count] * len(self.held), self.group)
        coming = coming.view(len(self.held), self.count)  # from each rank, for each of this rank's experts
        going = torch.stack([part.sum() for part in counts.split(self.held)])
        outgoing, incoming = torch.stack([going, coming.sum(1)]).tolist()
        received = _Send.apply(rows[: sum(outgoing)], outgoing, incoming, self.group)
        outputs = self._run(experts, received, coming, backend)
        returned = _Send.apply(outputs, incoming, outgoing, self.group)
        return F.pad(returned, (0, 0, 0, len(rows) - len(returned)))

    def _run(self, experts: StackedExperts, received: Tensor, coming: Tensor, backend: Backend) -> Tensor:
        """Run received rows, ordered by rank and then by expert, through their experts; outputs keep the order."""
        if self.count == 0:  # nothing was received; the empty parameters get empty gradients, as on other ranks
            held = [tensor for linear in experts.children() for tensor in linear.held() if tensor is not None]
            return sum((tensor.sum() for tensor in held), received)
        numbers = torch.arange(self.count, device=coming.device).repeat(len(coming))
        expert = numbers.repeat_interleave(coming.flatten(), output_size=len(received))
        plan = dispatch(expert.unsqueeze(1), self.count, backend, complete=True)
        return from_rows(experts.rows_here(to_rows(received, plan), plan), plan)


def _send(rows: Tensor, outgoing: list[int], incoming: list[int], group: ProcessGroup) -> Tensor:
    """Send ``outgoing`` rows to each rank, in order, and receive ``incoming`` rows from each."""
    sent = collectives.all_to_all_single(rows.contiguous(), incoming, outgoing, group)
    return collectives.wait_tensor(sent)


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, outgoing: list[int], incoming: list[int], group: ProcessGroup) -> Tensor:
        ctx.back = incoming, outgoing, group
        return _send(rows, outgoing, incoming, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _send(grad, *ctx.back), None, None, None
