"""V-MoE: noisy softmax gates, of which the best k are kept without renormalising.

Riquelme, Puigcerver, Mustafa, Neumann, Jenatton, Susano Pinto, Keysers and Houlsby, "Scaling Vision with Sparse
Mixture of Experts", NeurIPS 2021.

    r_t = W_r x_t,  r̃_t = r_t + ε_t,  ε ~ N(0, (σ/E)²) in training, 0 in evaluation
    ĝ_t = softmax(r̃_t)                                              noise before softmax, softmax before top-k
    y_t = Σ_{e ∈ top-k(ĝ_t)} ĝ_{t,e} f_e(x_t)                       not renormalised over the k
    importance = CV²_e(Σ_t softmax(r_t)_e)                          CV² = variance/mean², of the clean gates
    load = CV²_e(Σ_t ρ_{t,e}),  ρ_{t,e} = 1 − Φ((τ_t − r_{t,e})·E/σ),  τ_t the k-th largest of r̃_t
    loss = w_i · importance + w_l · load

ρ is the probability that e would be chosen if its own noise were drawn again; gradients flow through r and τ. Without
noise (``noise=0``) ρ is a step function, and there is no load loss, as in the authors' code.

Choices: dropless by default. ``capacity_factor`` gives an expert C = ⌈cf·k·n/E⌉ places, rounded up to a multiple of 4
as in their code, for a sequence of n valid tokens. First choices of all tokens are placed before second ones; within a
rank, tokens are placed in token order or, with ``priority_routing`` (Batch Priority Routing), by descending largest
gate. A choice that finds its expert full gives 0; the token's other choice keeps its weight. The authors' group is 8
images, ours is one sequence, so that a result does not depend on its batch; their losses are averages over groups, ours
use one global sum over all valid tokens; all their experts start from the same weights, ours independently.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from intbmoe.checks import require
from intbmoe.layer import Result, Routing
from intbmoe.parts.capacity import CapacityConfig, CapacityLayer
from intbmoe.parts.dispatch import capacity_of, limit_capacity
from intbmoe.parts.losses import global_sum, masked_sum, squared_variation
from intbmoe.parts.router import count_choices, mask_choices, top_k
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import AtMost, NonNegative, PositiveInt


@dataclass(frozen=True, kw_only=True)
class VMoEConfig(CapacityConfig):
    """Noisy top-k routing."""

    top_k: Annotated[PositiveInt, AtMost("experts")] = 2
    """k, experts per token."""
    noise: NonNegative = 1.0
    """σ, the noise on the logits in training, in units of 1/E."""
    importance: float = 0.005
    """w_i, the coefficient of the importance loss."""
    load: float = 0.005
    """w_l, the coefficient of the load loss."""
    capacity_multiple: PositiveInt = 4
    """Capacities are rounded up to a multiple of this."""
    priority_routing: bool = False
    """Give places to the tokens with the largest gates first, instead of in token order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        useful = self.has_capacity or not self.priority_routing
        require(useful, "priority_routing", self.priority_routing, "False without a capacity factor")


@register("vmoe", title="V-MoE", paper="Riquelme et al., 2021", code="google-research/vmoe", participation="sparse")
class VMoE(CapacityLayer):
    """Top-k token choice with noisy gates and two balancing losses."""

    Config = VMoEConfig
    REPLAYS = True

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        clean = noisy = self.router(wide(x)).flatten(0, 1)
        if self.training and c.noise:
            noisy = clean + torch.randn_like(clean) * (c.noise / c.experts)
        gates = noisy.softmax(-1)
        best = top_k(noisy, c.top_k)
        chosen = ids = mask_choices(best, mask)
        capacity = self._capacity(x, mask)
        if capacity is not None:
            priority = gates.detach().amax(-1).view(x.shape[:2]) if c.priority_routing else None
            ranked = chosen.view(*x.shape[:2], c.top_k)
            ids = limit_capacity(ranked, c.experts, capacity, priority).reshape(chosen.shape)
        weights = torch.where(ids < 0, 0, gates.gather(1, ids.clamp(min=0)))
        tokens = x.reshape(-1, c.dim).to(dtype)
        y, load = self.experts.route(tokens, ids, weights, complete=mask is None and capacity is None)
        wanted = load if capacity is None else count_choices(chosen, c.experts)
        losses = {}
        if self.training:
            importance = global_sum(masked_sum(clean.softmax(-1), mask))
            losses["importance"] = c.importance * squared_variation(importance)
            if c.noise:
                threshold = noisy.gather(1, best[:, -1:])
                wins = torch.special.ndtr((clean - threshold) * (c.experts / c.noise))
                losses["load"] = c.load * squared_variation(global_sum(masked_sum(wins, mask)))
        sums = {"load": load, "dropped": wanted.sum() - load.sum()}
        return Result(y.view(x.shape), Routing(ids, weights), losses, sums)

    def _capacity(self, x: Tensor, mask: Tensor | None) -> int | Tensor | None:
        """Places per expert for a sequence; (B, 1) with a mask, since padding needs no place."""
        c = self.config
        ratio = self._ratios[self.training]
        if ratio is None:
            return None
        valid = x.shape[1] if mask is None else mask.sum(1, keepdim=True)
        return capacity_of(ratio, c.top_k * valid, c.experts, c.capacity_multiple)
