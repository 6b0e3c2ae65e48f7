"""Dense mixture: every expert runs on every token, and their outputs are mixed.

Jacobs, Jordan, Nowlan and Hinton, "Adaptive Mixtures of Local Experts", Neural Computation 1991. This is Eq. 2 of the
IntBMoE paper: the full participation that sparse methods give up for speed:

    p_t = softmax(W_r x_t)
    y_t = Σ_e p_{t,e} f_e(x_t)                                      all E experts

Choices: experts are FFNs and the router has no bias, as in the other mixtures. There is no auxiliary loss and no
official code.
"""

from typing import Any

import torch
from torch import Tensor

from intbmoe.layer import MoELayer, Quantities, Result
from intbmoe.parts.experts import ExpertsConfig
from intbmoe.parts.linear import Linear
from intbmoe.precision import wide
from intbmoe.registry import register


@register("mixture", title="Dense mixture", paper="Jacobs et al., 1991", participation="dense")
class Mixture(MoELayer):
    """The output is a weighted mean of all experts' outputs."""

    Config = ExpertsConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router = Linear(self.config.dim, self.config.experts, bias=False)
        self.experts = self.config.make_experts()

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        weights = self.router(wide(x)).softmax(-1).flatten(0, 1)
        return Result(self.experts.mix(x.flatten(0, 1).to(dtype), weights).view(x.shape))

    def quantities(self) -> Quantities:
        return Quantities(participation=self.config.experts, execution=self.config.experts, materialization=0)
