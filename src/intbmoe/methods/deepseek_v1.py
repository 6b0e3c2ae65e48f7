"""DeepSeekMoE: each token gets several of many small experts, plus shared experts that are always on.

Dai et al., "DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language Models", 2024
(arXiv 2401.06066), Sections 3.1 to 3.3.

    s_t = softmax(W_r x_t),  K_t = top-k(s_t)
    y_t = Σ_shared f_i(x_t) + Σ_{e ∈ K_t} s_{t,e} f_e(x_t)          the weights are not renormalised
    f_e = E/(k T) #{t : e ∈ K_t},  P_e = 1/T Σ_t s_{t,e}            T valid tokens
    loss = α_1 Σ_e f_e P_e + α_2 Σ_i f'_i P'_i                      both sums are 1 if the load is even
    f'_i, P'_i  the mean of f_e and the sum of P_e over the experts of device i

Fine-grained segmentation splits each of N experts into m experts of 1/m the width, and chooses m times as many. Here
``experts`` and ``hidden`` are literal: ``match_budget`` splits by the paper's m = 4, counts one shared expert among the
small ones, and chooses 4·2 − 1 = 7, as in the paper's 2B model (63 routed, 7 chosen, 1 shared).

Choices: α_1 = 0.01, as in the paper's 2B model (0.001 in 16B). α_2 = 0.05 applies if ``devices`` splits the experts
(the paper's 145B); by default there is one device, whatever ``train.parallel`` does, and no second loss. Several shared
experts are one SwiGLU of their joint width, which is the same function. Nothing is dropped. The 16B model that the
authors released computes the loss per sequence; here it is computed over all tokens, as in the paper.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from intbmoe.checks import require
from intbmoe.layer import Result, Routing
from intbmoe.parts.losses import count_valid, global_sum, masked_sum
from intbmoe.parts.router import mask_choices, top_k
from intbmoe.parts.shared import SharedConfig, SharedLayer
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import AtMost, PositiveInt


@dataclass(frozen=True, kw_only=True)
class DeepSeekV1Config(SharedConfig):
    """Top-k routing over many small experts, plus shared ones."""

    experts: PositiveInt = 63
    """E, routed experts; shared ones come on top."""
    top_k: Annotated[PositiveInt, AtMost("experts")] = 7
    """k, routed experts per token."""
    balance: float = 0.01
    """α_1, the coefficient of the expert-level balance loss."""
    device_balance: float = 0.05
    """α_2, the coefficient of the device-level balance loss if there is more than one device."""
    devices: PositiveInt = 1
    """Groups of neighbouring experts, one per device, that the device-level loss balances."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.experts % self.devices == 0, "devices", self.devices, f"a divisor of experts ({self.experts})")


@register(
    "deepseek_v1",
    title="DeepSeekMoE",
    paper="Dai et al., 2024",
    code="deepseek-ai/DeepSeek-MoE",
    participation="sparse",
)
class DeepSeekV1(SharedLayer):
    """Top-k token choice of small experts, plus shared ones."""

    Config = DeepSeekV1Config
    REPLAYS = True

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        scores = self.router(wide(x)).softmax(-1).flatten(0, 1)
        ids = mask_choices(top_k(scores, c.top_k), mask)
        weights = torch.where(ids < 0, 0, scores.gather(1, ids.clamp(min=0)))
        y, load = self.run_experts(x.flatten(0, 1).to(dtype), ids, weights, complete=mask is None)
        losses = {}
        if self.training:
            valid = global_sum(count_valid(x, mask).to(scores.dtype)).clamp(min=1)
            f = global_sum(load.to(scores.dtype)) * (c.experts / c.top_k) / valid
            p = global_sum(masked_sum(scores, mask)) / valid
            losses["balance"] = c.balance * (f * p).sum()
            if c.devices > 1:
                f, p = f.view(c.devices, -1).mean(1), p.view(c.devices, -1).sum(1)
                losses["device_balance"] = c.device_balance * (f * p).sum()
        return Result(y.view(x.shape), Routing(ids, weights), losses, {"load": load})
