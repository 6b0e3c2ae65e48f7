"""Devices and ranks: where the model lives, how it is replicated or sharded, and sums over all ranks.

Without a launcher there is one process; under ``torchrun`` there are many, and ``train.parallel`` says what each holds:
the whole model (``ddp``), shards of it (``fsdp``, which is FSDP2; ``ACCELERATE_USE_FSDP=true FSDP_VERSION=2``, as
``accelerate launch`` sets them, means the same), slices of the pools and shards of the rest (``pools``), or some of the
experts and the whole of the rest (``experts``); see ``intbmoe.parallel``. accelerate finds the device and the process
group, replicates and casts. Sharding calls torch's ``fully_shard`` directly, because accelerate (1.15) silently skips
FSDP on ranks without a GPU, and because one code path for CPU and GPU can be tested.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn

from intbmoe.layer import moe_layers
from intbmoe.parallel import pool_parameters, set_requires_gradient_sync, shard_experts, shard_pools
from intbmoe.parallel.ways import WAYS, refusals
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train.errors import LostRankError, TrainingError
from intbmoe.train.rendezvous import INIT_METHOD

LOST = ("closed by peer", "reset by peer", "broken pipe", "timed out waiting", "connection refused")
"""Phrases in gloo's messages when a rank is gone or silent."""


def stacked_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a Transformer: the members of its module lists that lie inside no other member.

    Lists inside an MoE layer do not count: a layer may use its parts' parameters without calling the parts.
    """
    inside_layers = {id(module) for _, layer in moe_layers(model) for module in layer.modules()}
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and id(m) not in inside_layers]
    inner = {id(m) for stack in stacks for member in stack for m in member.modules() if m is not member}
    members = [member for stack in stacks for member in stack if id(member) not in inner]
    return [member for member in members if any(True for _ in member.parameters())]


def compile_in_place(model: nn.Module) -> None:
    """Apply ``torch.compile`` without changing the parameters' names.

    If every MoE layer lies in a block, the blocks are compiled one by one: equal blocks share a graph, and a deep model
    compiles as fast as a shallow one.
    """
    # By default the compiler runs backward passes under the forward's autocast: what a layer computes in float32
    # (routers, hypernetworks) would then get its gradients from bfloat16 products.
    torch._functorch.config.backward_pass_autocast = "off"
    blocks = stacked_blocks(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    for part in blocks if all(id(layer) in inside for _, layer in moe_layers(model)) and blocks else [model]:
        part.compile()


class Ranks:
    """All processes of a training run, seen from one of them."""

    def __init__(self, precision: str = "float32", parallel: str = "ddp", patience: float = 600.0) -> None:
        # accelerate keeps one state per process and refuses to change its precision, but a later run may need another.
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="bf16" if precision == "bfloat16" else "no",
            kwargs_handlers=[InitProcessGroupKwargs(init_method=INIT_METHOD, timeout=timedelta(seconds=patience))],
        )
        self.patience = patience
        self.autocast, self.wait = self.accelerator.autocast, self.accelerator.wait_for_everyone
        self.device: torch.device = self.accelerator.device
        self.world: int = self.accelerator.num_processes
        self.rank: int = self.accelerator.process_index
        self.main: bool = self.accelerator.is_main_process
        self.parallel = parallel if self.world > 1 else "ddp"
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            if os.environ.get("FSDP_VERSION") != "2":
                raise TrainingError("ACCELERATE_USE_FSDP is set: only FSDP2 is supported, set FSDP_VERSION=2 too")
            if not dist.is_initialized():
                raise TrainingError("FSDP2 needs a process group: start with torchrun")
            if self.parallel == "experts":
                raise TrainingError(
                    "train.parallel='experts' keeps everything but the experts whole on every rank, but "
                    "ACCELERATE_USE_FSDP asks for shards: unset it"
                )
            self.parallel = "fsdp" if self.parallel == "ddp" else self.parallel
        self.sharded = self.parallel in ("fsdp", "pools")

    def place(self, model: nn.Module, settings: TrainSettings) -> nn.Module:
        """Move the model to this rank's device, compile it if asked, and replicate or shard it; names stay the same."""
        why = refusals(model)
        if self.parallel in why:
            others = " or ".join(repr(way) for way in WAYS if way not in why)
            raise TrainingError(
                f"train.parallel={self.parallel!r} does not fit this model, use {others}: {why[self.parallel]}"
            )
        if self.sharded:
            self._shard(model)
        else:
            if self.parallel == "experts":
                shard_experts(model, self._mesh())  # while the model is on the CPU: no device ever holds all experts
            model.to(self.device)
        if settings.compile:
            compile_in_place(model)
        if self.sharded or self.world == 1:
            return model
        return self.accelerator.prepare_model(model)

    def _shard(self, model: nn.Module) -> None:
        """Make one unit of each member of a module list (a Transformer's blocks), and one of the rest of the model."""
        from torch.distributed.fsdp import fully_shard

        mesh = self._mesh()
        if self.parallel == "pools":
            shard_pools(model, mesh)  # while the model is on the CPU: no device ever holds a whole pool
        model.to(self.device)
        how = {"mesh": mesh, "ignored_params": pool_parameters(model), "shard_placement_fn": self._placement}
        for block in stacked_blocks(model):
            fully_shard(block, **how)
        fully_shard(model, **how)

    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device.type, (self.world,))

    def _placement(self, parameter: nn.Parameter) -> Any:
        """Shard a dimension divisible by the ranks: for 8 stacked experts in 64 shards, 56 would be sent as padding."""
        from torch.distributed.tensor import Shard

        return next((Shard(place) for place, size in enumerate(parameter.shape) if size % self.world == 0), None)

    @contextmanager
    def accumulating(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Exchange gradients only in the backward pass of a step's last micro-batch."""
        if self.sharded:
            model.set_requires_gradient_sync(last)
            set_requires_gradient_sync(model, last)
        with nullcontext() if last or self.sharded or self.world == 1 else model.no_sync():
            yield

    @contextmanager
    def losses_are_explained(self) -> Iterator[None]:
        """Turn the error raised on contacting a rank that is gone or silent into one that says so."""
        try:
            yield
        except RuntimeError as error:  # gloo has no error class of its own
            told = str(error).lower()
            if self.world == 1 or not (isinstance(error, dist.DistError) or any(word in told for word in LOST)):
                raise
            raise LostRankError(
                f"rank {self.rank} has lost another rank, which has ended or has not answered for train.patience="
                f"{self.patience:g} seconds. If that rank left a message, it says why. The same command resumes from "
                f"the last checkpoint. ({error})"
            ) from error

    def sum(self, values: Tensor) -> Tensor:
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def from_main(self, number: int) -> int:
        if self.world == 1:
            return number
        message = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.broadcast(message, src=0)
        return int(message)

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; if it is, all ranks must call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        # Every rank has read the whole value and keeps its own part, so nothing is sent.
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)
