"""Mixtral: the top two experts of each token, weighted by a softmax over the two.

Jiang et al., "Mixtral of Experts", 2024 (arXiv 2401.04088), Section 2.1.

    r_t = W_r x_t,  K_t = top-k(r_t)
    g_t = softmax over r_{t,e} with e ∈ K_t                         = the softmax over all, divided by its sum over K_t
    y_t = Σ_{e ∈ K_t} g_{t,e} f_e(x_t)                              SwiGLU experts without biases, nothing dropped
    loss = α·E·Σ_e f_e P_e,  f_e = 1/T #{t : e ∈ K_t},  P_e the mean of softmax(r_t)_e;  k·α if the load is even

Choices: neither the paper nor the released inference code has a training loss. The loss here is Hugging Face's
``load_balancing_loss_func`` with its default coefficient, 0.001, computed in each layer over all valid tokens of all
ranks; theirs uses one statistic over the tokens of all layers.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from intbmoe.layer import Result, Routing
from intbmoe.parts.experts import ExpertsConfig, RoutedLayer
from intbmoe.parts.losses import balance_loss
from intbmoe.parts.router import mask_choices, top_k
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import AtMost, PositiveInt


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(ExpertsConfig):
    """Top-k routing with weights that sum to one."""

    expert: Literal["gelu", "swiglu"] = "swiglu"
    """The expert network: SwiGLU without biases, as in the paper, or a GELU FFN with biases."""
    top_k: Annotated[PositiveInt, AtMost("experts")] = 2
    """k, experts per token."""
    balance: float = 0.001
    """α, the coefficient of the load-balancing loss."""


@register(
    "mixtral", title="Mixtral", paper="Jiang et al., 2024", code="mistralai/mistral-inference", participation="sparse"
)
class Mixtral(RoutedLayer):
    """Top-k token choice with weights renormalised over the chosen experts."""

    Config = MixtralConfig
    REPLAYS = True

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        logits = self.router(wide(x)).flatten(0, 1)
        chosen = top_k(logits, c.top_k)
        ids = mask_choices(chosen, mask)
        weights = torch.where(ids < 0, 0, logits.gather(1, chosen).softmax(-1))
        y, load = self.experts.route(x.flatten(0, 1).to(dtype), ids, weights, complete=mask is None)
        losses = {}
        if self.training:
            losses["balance"] = c.balance * c.top_k * balance_loss(logits.softmax(-1), load, mask)
        return Result(y.view(x.shape), Routing(ids, weights), losses, {"load": load})
