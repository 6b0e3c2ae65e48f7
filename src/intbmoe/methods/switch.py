"""Switch Transformer: each token goes to its single best expert.

Fedus, Zoph and Shazeer, "Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient
Sparsity", JMLR 2022.

    p_t = softmax(W_r x̃_t),  x̃_t = x_t ⊙ U(1−ε, 1+ε) in training, x_t in evaluation
    y_t = p_{t,i} f_i(x_t),  i = argmax_e p_{t,e}
    loss = α·E·Σ_e f_e P_e,  f_e the share of tokens whose argmax is e, P_e the mean of p_{t,e}; gradient through P

Choices: the jitter ε multiplies only the router's input, as in the authors' code. Dropless by default;
``capacity_factor`` (authors: 1.25, in evaluation 2.0) gives the authors' capacity ⌊cf·T/E⌋, at least 4: tokens are
placed in order, and those that find no place give zero. Capacity is per sequence, so that a result does not depend on
its batch (the authors': per slice of the device's batch). The loss uses one statistic over all valid tokens of all
ranks, whereas the authors average the losses of the groups. No z-loss, as in the paper; the router has no bias.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intbmoe.layer import Result, Routing
from intbmoe.parts.capacity import CapacityConfig, CapacityLayer
from intbmoe.parts.dispatch import limit_capacity
from intbmoe.parts.losses import balance_loss
from intbmoe.parts.router import count_choices, mask_choices, top_k
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import Share

MIN_CAPACITY = 4


@dataclass(frozen=True, kw_only=True)
class SwitchConfig(CapacityConfig):
    """Top-1 routing."""

    balance: float = 0.01
    """α, the coefficient of the load-balancing loss."""
    jitter: Share = 0.01
    """ε, multiplicative noise on the router's input in training."""


@register(
    "switch", title="Switch Transformer", paper="Fedus et al., 2022", code="tensorflow/mesh", participation="sparse"
)
class Switch(CapacityLayer):
    """Top-1 token choice with a load-balancing loss."""

    Config = SwitchConfig
    REPLAYS = True
    executed = 1

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        seen = wide(x)
        if self.training and c.jitter:
            seen = seen * torch.empty_like(seen).uniform_(1 - c.jitter, 1 + c.jitter)
        probabilities = self.router(seen).softmax(-1).flatten(0, 1)
        chosen = mask_choices(top_k(probabilities, 1), mask)
        capacity = self.places(x, mask, MIN_CAPACITY)
        ids = chosen
        if capacity is not None:
            ids = limit_capacity(chosen.view(*x.shape[:2], 1), c.experts, capacity).view_as(chosen)
        weights = torch.where(ids < 0, 0, probabilities.gather(1, ids.clamp(min=0)))
        tokens = x.reshape(-1, c.dim).to(dtype)
        y, load = self.experts.route(tokens, ids, weights, complete=mask is None and capacity is None)
        wanted = load if capacity is None else count_choices(chosen, c.experts)
        losses = {}
        if self.training:
            losses["balance"] = c.balance * balance_loss(probabilities, wanted, mask)
        sums = {"load": load, "dropped": wanted.sum() - load.sum()}
        return Result(y.view(x.shape), Routing(ids, weights), losses, sums)
