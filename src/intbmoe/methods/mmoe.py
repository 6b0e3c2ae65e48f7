"""MMoE: one pool of experts for all tasks, and a gate for each task.

Ma, Zhao, Yi, Chen, Hong and Chi, "Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts", KDD 2018, Eq. 6 and 7.

    g_t^k = softmax(W^k x_t)                                        a linear gate without a bias for each task k
    y_t^k = Σ_e g_{t,e}^k f_e(x_t)                                  all experts run; towers, on top, are the host's

``layer(x, conditioning=c)`` returns Σ_k c_k y^k: with c = (0, …, 1, …, 0) it is the output for task k. Without tasks
(``conditioning_dim=0``) there is one gate, and the layer is the dense mixture.

Choices: experts are FFNs, as in the other methods (the paper's: one layer with ReLU). There is no auxiliary loss, as in
the paper; the expert dropout of a later paper (Zhao et al., 2019) is left out. There is no official code; the gates
were checked against the implementations of DeepCTR and tensorflow_utils.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intbmoe.layer import MoELayer, Quantities, Result
from intbmoe.parts.conditioning import check_conditioning
from intbmoe.parts.experts import ExpertsConfig
from intbmoe.parts.linear import Linear
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class MMoEConfig(ExpertsConfig):
    """One gate per task."""

    conditioning_dim: NonNegativeInt = 0
    """The number of tasks, whose outputs layer(x, conditioning=vector) weights; 0 for a single task."""


@register("mmoe", title="MMoE", paper="Ma et al., 2018", participation="dense")
class MMoE(MoELayer):
    """The weighted mean of all experts' outputs, with separate weights for each task."""

    Config = MMoEConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.router = Linear(c.dim, max(1, c.conditioning_dim) * c.experts, bias=False)
        self.experts = c.make_experts()

    def compute(
        self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype, conditioning: Tensor | None = None
    ) -> Result:
        c = self.config
        tasks = check_conditioning(conditioning, c.conditioning_dim, wide(x))
        gates = self.router(wide(x)).flatten(0, 1).unflatten(-1, (-1, c.experts)).softmax(-1)  # (N, tasks, E)
        weights = gates.squeeze(1) if tasks is None else torch.einsum("nke,k->ne", gates, tasks)
        return Result(self.experts.mix(x.flatten(0, 1).to(dtype), weights).view(x.shape))

    def quantities(self) -> Quantities:
        return Quantities(participation=self.config.experts, execution=self.config.experts, materialization=0)
