"""The sparsely-gated mixture: noisy top-k gates, and two losses that balance importance and load.

Shazeer, Mirhoseini, Maziarz, Davis, Le, Hinton and Dean, "Outrageously Large Neural Networks: The Sparsely-Gated
Mixture-of-Experts Layer", ICLR 2017, Eq. 3 to 11; ``noisy_top_k_gating`` of tensor2tensor's expert_utils.py is their
code.

    r_t = W_g x_t,  σ_t = softplus(W_n x_t) + ε,  r̃_t = r_t + σ_t ⊙ N(0, 1) in training, r_t in evaluation
    g_t = softmax over the k largest of r̃_t                         0 elsewhere
    y_t = Σ_e g_{t,e} f_e(x_t)
    importance = CV²_e(Σ_t g_{t,e})                                 CV² = variance/mean²
    load = CV²_e(Σ_t ρ_{t,e}),  ρ_{t,e} = Φ((r_{t,e} − τ_{t,e})/σ_{t,e})
    loss = w_i · importance + w_l · load

τ_{t,e} is the k-th largest of r̃_t without e: the (k + 1)-th largest of all if e is chosen, otherwise the k-th. So ρ is
the probability that e is chosen if its noise is drawn again. Gradients flow through r, σ and τ.

Choices: W_g and W_n are one matrix and start at zero, as in the paper and the code; until training changes them, all
scores tie in evaluation and tokens go to the first experts. ε = 0.01 is from the code; the paper has none.
w_i = w_l = 0.1 is what the paper used on language; the code's default is 0.01. Without noise (``noise=0``), or if all
experts are chosen, there is no load loss. There is one level of routing: the paper's hierarchical mixture is left out.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.layer import Result, Routing
from intbmoe.parts.experts import ExpertsConfig, RoutedLayer
from intbmoe.parts.linear import Linear
from intbmoe.parts.losses import global_sum, masked_sum, squared_variation
from intbmoe.parts.router import mask_choices, top_k
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import AtMost, NonNegative, PositiveInt

NOISE_EPS = 0.01


@dataclass(frozen=True, kw_only=True)
class ShazeerConfig(ExpertsConfig):
    """Noisy top-k routing with learned noise."""

    top_k: Annotated[PositiveInt, AtMost("experts")] = 2
    """k, experts per token."""
    noise: NonNegative = 1.0
    """Factor on the noise in training; 0 for no noise."""
    importance: float = 0.1
    """w_i, the coefficient of the importance loss."""
    load: float = 0.1
    """w_l, the coefficient of the load loss."""
    router_std: NonNegative = 0.0
    """Standard deviation of the router's initial weights."""


@register(
    "shazeer",
    title="Sparsely-gated MoE",
    paper="Shazeer et al., 2017",
    code="tensorflow/tensor2tensor",
    participation="sparse",
)
class Shazeer(RoutedLayer):
    """Top-k token choice with noisy gates and two balancing losses."""

    Config = ShazeerConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router = Linear(self.config.dim, 2 * self.config.experts, bias=False)  # scores, then noise
        nn.init.normal_(self.router.weight, std=self.config.router_std)

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        clean, raw = self.router(wide(x)).flatten(0, 1).chunk(2, dim=-1)
        noisy, deviation = clean, None
        if self.training and c.noise:
            deviation = c.noise * (F.softplus(raw) + NOISE_EPS)
            noisy = clean + deviation * torch.randn_like(clean)
        best = top_k(noisy, min(c.top_k + 1, c.experts))
        chosen = best[:, : c.top_k]
        ids = mask_choices(chosen, mask)
        weights = torch.where(ids < 0, 0, noisy.gather(1, chosen).softmax(-1))
        y, load = self.experts.route(x.flatten(0, 1).to(dtype), ids, weights, complete=mask is None)
        losses = {}
        if self.training:
            # Sum over the tokens that chose an expert as a product with 0/1, which needs no scatter.
            member = F.one_hot(chosen, c.experts).to(weights.dtype)
            gates = (weights.unsqueeze(1) @ member).squeeze(1)
            losses["importance"] = c.importance * squared_variation(global_sum(masked_sum(gates, mask)))
            if deviation is not None and c.top_k < c.experts:
                ranked = noisy.gather(1, best)
                threshold = torch.where(member.sum(1) > 0, ranked[:, -1:], ranked[:, -2:-1])
                wins = torch.special.ndtr((clean - threshold) / deviation)
                losses["load"] = c.load * squared_variation(global_sum(masked_sum(wins, mask)))
        return Result(y.view(x.shape), Routing(ids, weights), losses, {"load": load})
