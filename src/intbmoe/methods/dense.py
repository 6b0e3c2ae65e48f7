"""Dense feed-forward layers: the baselines without experts that every mixture is compared with.

dense     y = W_2 GELU(W_1 x + b_1) + b_2         Vaswani et al., 2017; Hendrycks and Gimpel, 2016
swiglu    y = W_2 (SiLU(W_1 x) ⊙ W_3 x)           Shazeer, "GLU Variants Improve Transformer", 2020
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from intbmoe.layer import MoELayer, Quantities, Result
from intbmoe.parts.experts import ExpertsConfig
from intbmoe.registry import register
from intbmoe.settings import MustBe, Positive


@dataclass(frozen=True, kw_only=True)
class DenseConfig(ExpertsConfig):
    """One expert, always on."""

    experts: Annotated[Literal[1], MustBe("1 in a dense layer")] = 1
    """Always 1."""
    std: Positive | None = None
    """Standard deviation of a truncated normal for the initial weights, as in some backbones; None for nn.Linear's."""


@register("swiglu", title="Dense SwiGLU", paper="Shazeer, 2020", participation="dense", expert="swiglu")
@register("dense", title="Dense", paper="Vaswani et al., 2017", participation="dense")
class Dense(MoELayer):
    """A plain feed-forward layer with the same interface as the mixtures."""

    Config = DenseConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.experts = self.config.make_experts()
        if self.config.std is not None:
            for linear in self.experts.children():
                nn.init.trunc_normal_(linear.weight, std=self.config.std)

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        y = self.experts.batch(x.to(dtype).reshape(1, -1, self.config.dim))
        return Result(y.view(x.shape))

    def quantities(self) -> Quantities:
        return Quantities(participation=1, execution=1, materialization=0)
