"""ReMoE: ReLU instead of softmax and top-k, so that outputs do not jump when an expert becomes active or inactive.

Wang, Chen and Zhu, "ReMoE: Fully Differentiable Mixture-of-Experts with ReLU Routing", ICLR 2025.

    R_{t,e} = ReLU(w_e · x_t)                             active: R_{t,e} > 0; the number of experts varies by token
    y_t = Σ_e R_{t,e} f_e(x_t)                            0 for a token without an active expert
    loss = λ · 1/n Σ_t Σ_e f_e R_{t,e},   f_e = E/(k n) · #{t : R_{t,e} > 0}      n valid tokens; f_e constant
    λ ← λ · a  if S < 1 − k/E,  else λ / a                after each optimizer step

S is the share of zeros among all R of the step, averaged over the MoE layers; a = 1.2. λ is one number for the whole
model: every layer holds a copy, and all copies change together. At the target load f_e = 1 and the loss is a plain L1
norm.

Choices: k = 1 and the router's N(0, 0.01²) are from the authors' scripts. If S equals its target, λ is divided, as in
their code; in the paper λ would stay. A step without any valid token changes nothing. λ stays within float32's normal
numbers, because from zero it could never grow again. f_e and S count the valid tokens of all ranks and micro-batches,
theirs are averages of local values; S is averaged over the MoE layers, theirs over all layers. As in their code, the
loss is summed over layers, and λ absorbs the factor. Shapes must not depend on the routing, so on a GPU all N·E rows
are allocated and kernels skip those of inactive experts (``ops/expert_rows``); on the CPU they are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.layer import Result, Routing
from intbmoe.parts.experts import ChoosingLayer, ExpertsConfig
from intbmoe.parts.linear import Linear
from intbmoe.parts.losses import count_valid, global_sum
from intbmoe.parts.router import pack_choices
from intbmoe.parts.state import WideBuffers
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import AtMost, MustBe, Positive, PositiveInt

FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, kw_only=True)
class ReMoEConfig(ExpertsConfig):
    """ReLU routing with a sparsity target."""

    top_k: Annotated[PositiveInt, AtMost("experts")] = 1
    """k, the target for the mean number of active experts, which λ controls."""
    sparsity_strength: Annotated[
        float, MustBe("positive, within float32", lambda value: FLOAT32.tiny <= value <= FLOAT32.max)
    ] = 1e-8
    """The initial value of λ."""
    sparsity_rate: Annotated[float, MustBe("a finite number greater than 1", lambda value: value > 1)] = 1.2
    """a, the factor by which λ changes per step."""
    router_std: Positive | None = 0.01
    """Standard deviation of the router's initial weights; None for the initialisation of nn.Linear."""


@register("remoe", title="ReMoE", paper="Wang et al., 2025", code="thu-ml/ReMoE", participation="sparse", dynamic=True)
class ReMoE(WideBuffers, ChoosingLayer):
    """Every expert with a positive score is active; a controller keeps their mean number at k."""

    Config = ReMoEConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.router = Linear(c.dim, c.experts, bias=False)
        if c.router_std is not None:
            nn.init.normal_(self.router.weight, std=c.router_std)
        self.experts = c.make_experts()
        self.register_buffer("strength", torch.tensor(c.sparsity_strength, dtype=torch.float32))

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        # A masked token is zero, so its scores are zero and no expert is active.
        scores = self.router(wide(x)).flatten(0, 1).relu()
        ids, weights = pack_choices(scores, ~(scores <= 0))  # NaN counts as active, so that it is noticed
        y, load = self.experts.route(x.reshape(-1, c.dim).to(dtype), ids, weights)
        losses = {}
        if self.training:
            tokens = global_sum(count_valid(x, mask).to(scores.dtype)).clamp(min=1)
            f = global_sum(load.to(scores.dtype)) * (c.experts / c.top_k) / tokens
            losses["sparsity"] = self.strength * (f * global_sum(scores.sum(0)) / tokens).sum()
        return Result(y.view(x.shape), Routing(ids, weights), losses, {"load": load})

    @classmethod
    def family_after_step(cls, layers: Sequence[Self], sums: Sequence[dict[str, Tensor]], optimizer: Any) -> None:
        rates = {layer.config.sparsity_rate for layer in layers}
        require(len(rates) == 1, "sparsity_rate", sorted(rates), "the same in all ReMoE layers: they share one λ")
        strength = layers[0].strength
        excess = torch.zeros((), dtype=torch.float64, device=strength.device)
        seen = torch.zeros((), dtype=torch.int64, device=strength.device)
        for layer, step in zip(layers, sums, strict=True):
            c, tokens = layer.config, step["tokens"]
            # The layer's (1 − k/E) − S, from a difference of integers, so that equality is exact.
            above = (step["load"].sum() - c.top_k * tokens).double() / (c.experts * tokens.clamp(min=1))
            excess, seen = excess + above.to(excess.device), seen + tokens.to(seen.device)
        rate = rates.pop()
        moved = torch.where(excess > 0, strength * rate, strength / rate).clamp(FLOAT32.tiny, FLOAT32.max)
        moved = torch.where(seen == 0, strength, moved)
        for layer in layers:
            layer.strength.copy_(moved)
