"""A small model with a mixture, trained by one process on the whole batch or by ranks that split it."""

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
    def __init__(self, checkpointed=False, method="intbmoe", **options):
        super().__init__()
        torch.manual_seed(0)
        defaults = {"hidden": HIDDEN, "experts": EXPERTS, "blocks": BLOCKS} if method == "intbmoe" else {"hidden": 5}
        self.first = nn.Linear(DIM, DIM)
        self.mixture = intbmoe.create(method, DIM, **{**defaults, **options})
        self.checkpointed = checkpointed

    def forward(self, x, mask=None):
        x = self.first(x)
        if self.checkpointed:
            return checkpoint(self.mixture, x, mask, use_reentrant=False)
        return self.mixture(x, mask)


def batch(step, masked, examples=12):
    """Tokens and their mask: some valid tokens in all examples or, with ``"half"``, all tokens of the first half."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(examples, 4, DIM, dtype=torch.float64, generator=generator)
    if not masked:
        return x, torch.ones(examples, 4, dtype=torch.bool)
    if masked == "half":
        return x, torch.arange(examples * 4).view(examples, 4) < examples * 2
    return x, torch.rand(examples, 4, generator=generator) > 0.3


def train_alone(options, masked=False, steps=STEPS):
    """State and gradient norms of one process on whole batches, in plain torch without ``intbmoe.parallel``."""
    model = Small(**options).double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        x, mask = batch(step, masked)
        _loss(model, model, x, mask if masked else None).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        intbmoe.after_step(model, optimizer)
    return model.state_dict(), norms


class Shared:
    """The same training on ranks: pools or experts are divided among them, the rest is under FSDP2 or DDP."""

    def __init__(self, rank, world, options, rest="ddp", recompute=False, checkpointed=False, dtype=torch.float64):
        self.rank, self.world, self.rest = rank, world, rest
        self.model = model = Small(checkpointed, **options).to(dtype)
        mesh = init_device_mesh("cpu", (world,))
        if "method" in options:
            parallel.shard_experts(model, mesh)
            self.apart = apart = parallel.expert_parameters(model)
        else:
            model.mixture.recompute = recompute
            parallel.shard_pools(model, mesh)
            self.apart = apart = parallel.pool_parameters(model)
        model.to("cpu")  # for which torch replaces sharded parameters by new ones
        if rest == "fsdp":
            fully_shard(model.mixture, mesh=mesh, ignored_params=apart)
            self.wrapped = fully_shard(model, mesh=mesh, ignored_params=apart)
        else:
            self.wrapped = DistributedDataParallel(model)
        others = [parameter for parameter in model.parameters() if parameter not in apart]
        groups = [{"params": [p for p in model.parameters() if p in apart]}, {"params": others}]
        self.optimizer = torch.optim.AdamW(groups, 1e-2, fused=True)

    def step(self, number, accumulation=1, masked=False):
        self.optimizer.zero_grad()
        parts = [part.chunk(self.world)[self.rank].chunk(accumulation) for part in batch(number, masked)]
        for place, (x, mask) in enumerate(zip(*parts, strict=True), 1):
            last = place == accumulation
            parallel.set_requires_gradient_sync(self.model, last)
            if self.rest == "fsdp":
                self.model.set_requires_gradient_sync(last)
            with nullcontext() if last or self.rest == "fsdp" else self.wrapped.no_sync():
                x = x.to(self.model.mixture.weight_dtype)
                loss = _loss(self.wrapped, self.model, x, mask if masked else None, self.world * accumulation)
                (loss * self.world).backward()
        norm = parallel.clip_grad_norm(self.model.parameters(), 1.0)
        self.optimizer.step()
        intbmoe.after_step(self.model, self.optimizer)
        return float(norm)

    def state(self):
        return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in self._items()}

    def _items(self):
        return [(name, value.detach()) for name, value in self.model.state_dict().items()]

    def held(self):
        """Bytes of the divided parameters: weights, gradients and both moments."""
        state = self.optimizer.state
        tensors = [(p, p.grad, state[p]["exp_avg"], state[p]["exp_avg_sq"]) for p in self.apart]
        return [[parallel.local(tensor).untyped_storage().nbytes() for tensor in one] for one in tensors]


def train_cases(rank, world, cases):
    """State and gradient norms of each case, by its name."""
    results = {}
    for name, case in cases.items():
        case = dict(case)
        how = {key: case.pop(key) for key in ("accumulation", "masked") if key in case}
        shared = Shared(rank, world, case.pop("options", {}), **case)
        norms = [shared.step(number, **how) for number in range(STEPS)]
        results[name] = shared.state(), norms
    return results


def assert_same(found, case):
    """Every rank has the results of a single process, to 1e-10 in float64."""
    expected, norms = train_alone(case.get("options", {}), case.get("masked", False))
    for state, norms_there in found:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=name)
        torch.testing.assert_close(norms_there, norms, rtol=1e-10, atol=0)


def _loss(model, inner, x, mask, parts=1):
    """The loss of one of ``parts`` equal parts of the batch; the auxiliary loss is over all ranks."""
    return model(x, mask).square().sum() + intbmoe.aux_loss(inner) / parts
