"""A small model with an IntBMoE, trained by one process on the whole batch, or by ranks that share its pools out."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import intbmoe
from intbmoe import parallel

DIM, HIDDEN, EXPERTS, BLOCKS = 7, (5, 6), 6, 3
STEPS = 20
"""Widths that neither two nor four ranks divide: with four, one has nothing of the first inner width."""


class Small(nn.Module):
    def __init__(self, checkpointed=False, **options):
        super().__init__()
        torch.manual_seed(0)
        hidden = options.pop("hidden", HIDDEN)
        self.first = nn.Linear(DIM, DIM)
        self.mixture = intbmoe.create("intbmoe", DIM, hidden=hidden, experts=EXPERTS, blocks=BLOCKS, **options)
        self.checkpointed = checkpointed

    def forward(self, x, mask=None):
        x = self.first(x)
        if self.checkpointed:
            return checkpoint(self.mixture, x, mask, use_reentrant=False)
        return self.mixture(x, mask)


def batch(step, examples=12):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(examples, 4, DIM, dtype=torch.float64, generator=generator)
    return x, torch.rand(examples, 4, generator=generator) > 0.3


def train_alone(options, masked=False, steps=STEPS):
    """State and gradient norms of one process on whole batches: plain torch, nothing of ``intbmoe.parallel``."""
    model = Small(**options).double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        x, mask = batch(step)
        _loss(model, model, x, mask if masked else None).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        intbmoe.after_step(model)
    return model.state_dict(), norms


class Shared:
    """The same on ranks: pools shared out, the rest under FSDP2 or DDP."""

    def __init__(self, rank, world, options, rest="ddp", recompute=False, checkpointed=False, dtype=torch.float64):
        self.rank, self.world, self.rest = rank, world, rest
        self.model = model = Small(checkpointed, **options).to(dtype)
        model.mixture.recompute = recompute
        mesh = init_device_mesh("cpu", (world,))
        parallel.shard_pools(model, mesh)
        pools = parallel.pool_parameters(model)
        if rest == "fsdp":
            fully_shard(model.mixture, mesh=mesh, ignored_params=pools)
            self.wrapped = fully_shard(model, mesh=mesh, ignored_params=pools)
        else:
            self.wrapped = DistributedDataParallel(model)
        others = [parameter for parameter in model.parameters() if parameter not in pools]
        groups = [{"params": [p for p in model.parameters() if p in pools]}, {"params": others}]
        self.optimizer = torch.optim.AdamW(groups, 1e-2, fused=True)

    def step(self, number, accumulation=1, masked=False):
        self.optimizer.zero_grad()
        parts = [part.chunk(self.world)[self.rank].chunk(accumulation) for part in batch(number)]
        for place, (x, mask) in enumerate(zip(*parts, strict=True), 1):
            last = place == accumulation
            parallel.set_requires_gradient_sync(self.model, last)
            if self.rest == "fsdp":
                self.model.set_requires_gradient_sync(last)
            with nullcontext() if last or self.rest == "fsdp" else self.wrapped.no_sync():
                x = x.to(self.model.mixture.weight_dtype)
                loss = _loss(self.wrapped, self.model, x, mask if masked else None)
                (loss * self.world).backward()
        norm = parallel.clip_grad_norm(self.model.parameters(), 1.0)
        self.optimizer.step()
        intbmoe.after_step(self.model)
        return float(norm)

    def state(self):
        return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in self._items()}

    def _items(self):
        return [(name, value.detach()) for name, value in self.model.state_dict().items()]


def _loss(model, inner, x, mask):
    loss = model(x, mask).square().sum()
    return loss + intbmoe.aux_loss(inner)
