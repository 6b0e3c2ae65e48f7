"""PLE: on each of several levels, every task has its own experts and also uses shared ones.

Tang, Liu, Zhao and Gong, "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for
Personalized Recommendations", RecSys 2020, Sections 4.1 (CGC) and 4.2.

    level j, task k:   x_j^k = Σ_e g_e f_e,  g = softmax(W_j^k x_{j−1}^k)   over k's own experts, on x_{j−1}^k,
                                                                           and the shared ones, on x_{j−1}^s
    level j, shared:   x_j^s = Σ_e g_e f_e,  g = softmax(W_j^s x_{j−1}^s)   over all experts; not on the last level
    x_0^k = x_0^s = x_t,  y_t^k = x_L^k                                    towers, on top, are the host's

``layer(x, conditioning=c)`` returns Σ_k c_k y^k: with c = (0, …, 1, …, 0) it is the output for task k. With
``conditioning_dim=0`` there is a single task, which still has its own and shared experts.

Choices: ``experts`` is the number on each level, half of which are shared if ``task_experts`` is None; experts are FFNs
from d to d, and gates have no bias. With ``levels=1`` the method is CGC. The paper's weights of the tasks' losses,
ω_k γ_k^t, belong to training and are left out: the travel task counts each label once. There is no official code; gates
and levels were checked against DeepCTR's implementation.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.layer import MoELayer, Quantities, Result
from intbmoe.parts.conditioning import check_conditioning
from intbmoe.parts.experts import ExpertsConfig, StackedLinear
from intbmoe.parts.linear import Linear
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class PLEConfig(ExpertsConfig):
    """Task-specific and shared experts on each of several levels."""

    conditioning_dim: NonNegativeInt = 0
    """The number of tasks, whose outputs layer(x, conditioning=vector) weights; 0 for a single task."""
    task_experts: PositiveInt | None = None
    """Experts per task on each level, not shared; None to divide half of all experts among the tasks."""
    levels: PositiveInt = 2
    """L, the number of consecutive extraction layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        enough = f"more than tasks · task_experts ({self.tasks} · {self.own}), so that some are shared"
        require(self.shared > 0, "experts", self.experts, enough)

    @property
    def tasks(self) -> int:
        return max(1, self.conditioning_dim)

    @property
    def own(self) -> int:
        return self.task_experts or max(1, self.experts // (2 * self.tasks))

    @property
    def shared(self) -> int:
        return self.experts - self.tasks * self.own


@register("ple", title="PLE", paper="Tang et al., 2020", participation="dense")
class PLE(MoELayer):
    """Levels of experts, some task-specific and some shared."""

    Config = PLEConfig
    REPLAYS = True
    KEPT_WIDE = ("router", "shared_router")
    DECAY_GROUPS = {"router": "routers", "shared_router": "routers"}  # noqa: RUF012

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        gates = c.own + c.shared
        self.router = nn.ModuleList(StackedLinear(c.tasks, c.dim, gates, bias=False) for _ in range(c.levels))
        self.shared_router = nn.ModuleList(Linear(c.dim, c.experts, bias=False) for _ in range(c.levels - 1))
        self.experts = nn.ModuleList(c.make_experts() for _ in range(c.levels))

    def compute(
        self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype, conditioning: Tensor | None = None
    ) -> Result:
        c = self.config
        shared = wide(x).flatten(0, 1)
        task = check_conditioning(conditioning, c.conditioning_dim, shared)
        streams = shared.expand(c.tasks, *shared.shape)  # (tasks, N, d)
        for level, experts in enumerate(self.experts):
            inputs = [streams.repeat_interleave(c.own, 0), shared.expand(c.shared, *shared.shape)]
            outputs = wide(experts.batch(torch.cat(inputs).to(dtype)))  # (experts, N, d): own ones by task, then shared
            own, common = outputs.split([c.tasks * c.own, c.shared])
            gates = wide(self.router[level](streams, "batch")).softmax(-1)
            streams = torch.einsum("kne,kend->knd", gates[..., : c.own], own.unflatten(0, (c.tasks, c.own)))
            streams = streams + torch.einsum("kne,end->knd", gates[..., c.own :], common)
            if level + 1 < c.levels:
                weights = self.shared_router[level](shared).softmax(-1)
                shared = torch.einsum("ne,end->nd", weights, outputs)
        y = streams.squeeze(0) if task is None else torch.einsum("knd,k->nd", streams, task)
        return Result(y.view(x.shape))

    def quantities(self) -> Quantities:
        every = self.config.levels * self.config.experts
        return Quantities(participation=every, execution=every, materialization=0)
