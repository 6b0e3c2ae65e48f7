"""DSFNet: experts merged with weights that depend on the scenario.

Yu, Duan, Xu, Chen, Liu, Liu, Yang, Chu and Guo, "DSFNet: Learning Disentangled Scenario Factorization for
Multi-Scenario Route Ranking", 2024 (arXiv 2404.00243).

    α(s) = softmax(A s + a)                                         s the scenario's vector
    y_t = f(x_t; Σ_i α_i(s) θ_i)                                    every weight and bias is merged

``layer(x, conditioning=s)`` takes one s for the whole call, or one per sequence. Without a scenario
(``conditioning_dim=0``) each token is its own scenario, s_t = x_t: parameters are merged per token, as in
``smear_token``.

Sources: we found no code, and of the paper only its abstract and the caption of its Figure 2, which give
W(s) = Σ_i α_i(s) W̃_i with gates computed from s. They do not state the form of the gate; here it is a softmax, as in
SMEAR. Left out, because we did not find their formulas: the two regularisers (which push the centroids of factors apart
and align the directions within a factor), the scenario-aware batch norm, which would also make a result depend on its
batch, and the feature filter (IntBMoE has one).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intbmoe.layer import MoELayer, OnePer, Quantities, Result
from intbmoe.parts.conditioning import check_conditioning
from intbmoe.parts.experts import ExpertsConfig
from intbmoe.parts.linear import Linear
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class DSFNetConfig(ExpertsConfig):
    """Experts merged per scenario."""

    conditioning_dim: NonNegativeInt = 0
    """Width of the scenario vector in layer(x, conditioning=vector); 0 if each token is its own scenario."""


@register("dsfnet", title="DSFNet", paper="Yu et al., 2024", participation="dense")
class DSFNet(MoELayer):
    """One merged expert per scenario."""

    Config = DSFNetConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.router = Linear(c.conditioning_dim or c.dim, c.experts)
        self.experts = c.make_experts()

    def compute(
        self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype, conditioning: Tensor | None = None
    ) -> Result:
        scenario = check_conditioning(conditioning, self.config.conditioning_dim, wide(x), per_sequence=True)
        tokens = x.to(dtype)
        if scenario is None:
            a = self.router(wide(x).flatten(0, 1)).softmax(-1)
            return Result(self.experts.merged(tokens.flatten(0, 1).unsqueeze(1), a).view(x.shape))
        return Result(self.experts.merged(tokens, self.router(scenario).softmax(-1).expand(x.shape[0], -1)))

    def quantities(self) -> Quantities:
        """By the method's definition; in fact ``ops/merged_mm`` builds no sets per token."""
        unit = "example" if self.config.conditioning_dim else "token"
        return Quantities(self.config.experts, execution=1, materialization=OnePer(unit))
