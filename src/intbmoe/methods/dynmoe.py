"""DynMoE: each token takes every expert it is similar enough to; experts are added and removed during training.

Guo et al., "Dynamic Mixture of Experts: An Auto-Tuning Approach for Efficient Transformer Models", ICLR 2025.

    s_{t,e} = m_e σ(τ cos(x_t, w_e)),   g_{t,e} = 1[s_{t,e} > σ(τ G_e)],   k_t = Σ_e g_{t,e}
    y_t = (1 / max(k_t, 1)) Σ_e g_{t,e} f_e(x_t)

with learned embeddings w_e and thresholds G_e, and m the mask of open slots. Backward: g = sign(ReLU(s − σ(τ G))) with
the gradient passed straight through the sign, so that w, G and x get a gradient only from the chosen pairs; k_t is a
count without gradient. In training a token that no expert takes gives 0; in evaluation it goes to the open expert with
the highest s.

    loss = α (‖M ∘ (ŵ ŵᵀ − I)‖_F + mean_e ‖w_e‖ + β_1 E² mean_e(P_e F_e) + β_2 mean_{t,e} g_{t,e})

ŵ the embeddings scaled to length 1, M = m mᵀ; the second term covers all slots, closed ones too. The third and fourth
are only in the authors' DeepSpeed code and are off by default: over tokens with at least one expert, P_e is the mean of
g_{t,e}/Σ_e g_{t,e} (with gradient through numerator and denominator) and F_e the mean of g_{t,e} (without gradient).

Every ``update_every`` optimizer steps the pool is updated from two records of these steps, R_E (activations of each
expert) and R_S (sum of the inputs of tokens that no expert took): close every expert with R_E = 0; then, if R_S ≠ 0 and
a slot is free, open the first free slot with w = R_S/‖R_S‖, G = 0 and whatever weights it holds.

When the pool is updated. The IntBMoE paper updates every 300 optimizer steps, and so does the default: every span is
recorded, over all ranks and micro-batches, and used. The authors' DeepSpeed code cycles through three spans of 300
forwards: it ignores the first, records the second and updates at its end, and ignores the third
(``cadence="official"``). Their Tutel code updates at every step in vision (``update_every=1``) and once per epoch on
GLUE.

When updates end. The authors never stop. But a new expert has untrained weights and gets a full share of its tokens:
one opened at step 900 of 942 raised a loss from 5.9 to 23, with no learning rate left to recover. So the pool is final
after half of the run (``adaptation``), when a cosine schedule still has 18 % of its summed learning rate left; 2.5 %
are left after three quarters and 0.2 % after nine tenths. ``adaptation=1`` is the authors' form, and also applies if
the training loop never calls ``plan_steps``.

Choices and differences. τ is fixed, as in the IntBMoE paper and the authors' DeepSpeed code; their Tutel gate learns
log τ, kept below log 100, from τ = 10 (``temperature=10, learn_temperature=True``). That gate also divides by Σ g with
its gradient (``denominator_gradient=True``; theirs skips this in a batch where no token has two experts); their
DeepSpeed gate divides by the count, as we do. If a whole span activated no expert, no expert is closed, but one may
still be opened. Opening and closing reset the slot's optimizer moments; weight decay and the length penalty still act
on a closed slot. Experts start independently (DeepSpeed: as copies). In evaluation g has its true derivative, zero. A
forward allocates N·E rows, of which the grouped kernel computes the chosen ones. Parameters sharded by FSDP2 are
refused, because slots are single rows. ``active_parameters`` uses the mean number of experts in the last training step,
counting a token without any as one (as in evaluation); before training it assumes half the pool, as for isotropic
inputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.layer import Result, Routing
from intbmoe.parts.losses import count_valid, global_sum
from intbmoe.parts.router import pack_choices, top_k
from intbmoe.parts.slots import PoolConfig, PoolLayer, reset_moments, unit
from intbmoe.precision import linear, wide
from intbmoe.registry import register
from intbmoe.settings import Positive, PositiveInt, Probability

LARGEST_TEMPERATURE = 100.0


@dataclass(frozen=True, kw_only=True)
class DynMoEConfig(PoolConfig):
    """Top-any routing over a pool of at most ``experts``."""

    temperature: Positive = 1.0
    """τ, multiplies the cosine and the threshold."""
    learn_temperature: bool = False
    """Learn τ, starting at temperature and limited to 100, as the authors' Tutel gate does."""
    denominator_gradient: bool = False
    """Let the gradient flow through k_t too, as in the authors' Tutel gate."""
    update_every: PositiveInt = 300
    """Optimizer steps per span."""
    cadence: Literal["paper", "official"] = "paper"
    """Update the pool after every span (IntBMoE's paper), or after the second of every three (authors' code)."""
    adaptation: Probability = 0.5
    """Fraction of the run after which the pool is final; 1 for never (authors)."""
    auxiliary: float = 0.01
    """α, the coefficient of the sum of the auxiliary losses."""
    load_balance: float = 0.0
    """β_1, load balance relative to diversity (authors' DeepSpeed code: 1)."""
    efficiency: float = 0.0
    """β_2, mean activation relative to diversity (authors' DeepSpeed code: 1)."""


@register(
    "dynmoe", title="DynMoE", paper="Guo et al., 2025", code="LINs-lab/DynMoE", participation="sparse", dynamic=True
)
class DynMoE(PoolLayer):
    """Top-any token choice by cosine and threshold, with a pool that adapts to demand."""

    Config = DynMoEConfig
    REPLAYS = True
    KEPT_WIDE = ("embeddings", "thresholds", "log_temperature")
    DECAY_GROUPS: ClassVar = {"embeddings": "routers", "thresholds": "scales", "log_temperature": "scales"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.embeddings = nn.Parameter(torch.empty(c.experts, c.dim))
        self.thresholds = nn.Parameter(torch.zeros(c.experts))
        with torch.no_grad():  # not in place: torch has no QR of half-precision matrices
            self.embeddings.copy_(nn.init.orthogonal_(wide(torch.empty_like(self.embeddings))))
        if c.learn_temperature:
            self.log_temperature = nn.Parameter(torch.full((1,), math.log(c.temperature)))  # FSDP2 shards no scalars
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))  # steps of the run so far
        self.register_buffer("end", torch.tensor(-1))  # the last step that may change the pool; −1 for no limit
        # Steps since the last span (or cycle of three) ended, and what was recorded in them.
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("activations", torch.zeros(c.experts, dtype=torch.int64))  # R_E
        self.register_buffer("uncovered_input", torch.zeros(c.dim, dtype=torch.float32))  # R_S

    def plan_steps(self, total: int) -> None:
        if self.taken == 0:
            self.end.fill_(int(total * self.config.adaptation))

    def fit_state(self, state: dict[str, Tensor], prefix: str) -> None:
        early = state.get(f"{prefix}steps")  # runs of earlier versions have no end
        if early is not None:
            state.setdefault(f"{prefix}taken", torch.zeros_like(early))
            state.setdefault(f"{prefix}end", torch.full_like(early, -1))

    def _temperature(self) -> Tensor | float:
        if not self.config.learn_temperature:
            return self.config.temperature
        return wide(self.log_temperature).clamp(max=math.log(LARGEST_TEMPERATURE)).exp()

    def _expected_choices(self) -> float:
        return max(1.0, self.config.start / 2)

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        seen = wide(x).reshape(-1, c.dim)
        cosine = linear(unit(seen), unit(wide(self.embeddings)))
        temperature = self._temperature()
        scores = torch.where(self.active, (temperature * cosine).sigmoid(), 0)
        margin = F.relu(scores - (temperature * wide(self.thresholds)).sigmoid())
        gates = margin.sign()
        if self.training:
            gates = gates + (margin - margin.detach())  # a straight-through gradient for the sign
        if mask is not None:
            gates = torch.where(mask.reshape(-1, 1), gates, 0)
        count = (gates.detach() > 0).sum(-1, keepdim=True)
        uncovered = count == 0 if mask is None else (count == 0) & mask.reshape(-1, 1)
        losses, chosen = {}, gates
        if self.training:
            losses["auxiliary"] = c.auxiliary * self._auxiliary(gates, count, count_valid(x, mask))
        else:
            best = top_k(cosine.detach().masked_fill(~self.active, -torch.inf), 1)
            alone = best == torch.arange(c.experts, device=x.device)
            chosen = torch.where(uncovered, alone.to(gates.dtype), gates)
        divisor = count.clamp(min=1)
        if c.denominator_gradient:  # the same number, with a gradient
            divisor = torch.where(count > 0, gates.sum(-1, keepdim=True), 1)
        ids, weights = pack_choices(chosen / divisor, chosen.detach() > 0)
        y, load = self.experts.route(x.reshape(-1, c.dim).to(dtype), ids, weights)
        lost = torch.where(uncovered, seen.detach(), 0).sum(0)
        sums = {"load": load, "uncovered": uncovered.sum(), "uncovered_input": lost}
        return Result(y.view(x.shape), Routing(ids, weights), losses, sums)

    def _auxiliary(self, gates: Tensor, count: Tensor, tokens: Tensor) -> Tensor:
        """Diversity and simplicity of the embeddings, and the DeepSpeed code's two terms if they are on."""
        c = self.config
        embeddings = wide(self.embeddings)
        directions = unit(embeddings)
        both = self.active.unsqueeze(0) & self.active.unsqueeze(1)
        excess = directions @ directions.t() - torch.eye(c.experts, dtype=directions.dtype, device=directions.device)
        diversity = torch.linalg.vector_norm(torch.where(both, excess, 0))
        total = diversity + torch.linalg.vector_norm(embeddings, dim=-1).mean()
        if c.load_balance:
            covered = global_sum((count > 0).sum().to(gates.dtype)).clamp(min=1)
            shares = gates / torch.where(count > 0, gates.sum(-1, keepdim=True), 1)
            mean_share = global_sum(shares.sum(0)) / covered
            mean_load = global_sum(gates.detach().sum(0)) / covered
            total = total + c.load_balance * c.experts**2 * (mean_share * mean_load).mean()
        if c.efficiency:
            pairs = global_sum(tokens.to(gates.dtype)).clamp(min=1) * c.experts
            total = total + c.efficiency * global_sum(gates.sum()) / pairs
        return total

    @classmethod
    @torch.no_grad()
    def family_after_step(cls, layers: Sequence[Self], sums: Sequence[dict[str, Tensor]], optimizer: Any) -> None:
        for layer, recorded in zip(layers, sums, strict=True):
            layer._require_whole_slots()
            layer._measure_choices(recorded["load"].sum() + recorded["uncovered"], recorded["tokens"])
            layer._count_step(recorded, optimizer)

    def _count_step(self, recorded: dict[str, Tensor], optimizer: Any) -> None:
        """Record the step if its span is recorded, and update the pool at the end of that span."""
        span, official = self.config.update_every, self.config.cadence == "official"
        first, last, cycle = (span, 2 * span, 3 * span) if official else (0, span, span)
        self.taken += 1
        self.steps += 1
        at = int(self.steps)
        if first < at <= last:
            self.activations += recorded["load"]
            self.uncovered_input += recorded["uncovered_input"]
        if at == last:
            if not 0 <= self.end < self.taken:
                self._adapt(optimizer)
            self.activations.zero_()
            self.uncovered_input.zero_()
        if at >= cycle:
            self.steps.zero_()

    def _adapt(self, optimizer: Any) -> None:
        """Close experts that no token used, and open one for tokens that no expert took."""
        used = self.active & (self.activations > 0)
        changed = self.active & ~used if used.any() else torch.zeros_like(used)
        self.active &= ~changed
        length = torch.linalg.vector_norm(wide(self.uncovered_input))
        if length > 0 and not self.active.all():
            slot = int(self.active.logical_not().nonzero()[0])
            self.embeddings[slot] = wide(self.uncovered_input) / length
            self.thresholds[slot] = 0
            self.active[slot] = changed[slot] = True
        reset_moments(optimizer, (self.embeddings, self.thresholds), changed)
        exchange = self.experts.exchange
        reset_moments(optimizer, self.experts.parameters(), changed, slice(None) if exchange is None else exchange.own)
