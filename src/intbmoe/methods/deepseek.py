"""DeepSeek-V3's MoE: sigmoid scores, a bias that affects only the choice, and a shared expert that is always on.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.

    s_{t,e} = sigmoid(w_e · x_t),  K_t = top-k_e (s_{t,e} + b_e)
    g_{t,e} = ρ · s_{t,e} / Σ_{j ∈ K_t} s_{t,j}  for e ∈ K_t                    ρ: route_scale; b is not in the weight
    y_t = f_shared(x_t) + Σ_{e ∈ K_t} g_{t,e} f_e(x_t)                          SwiGLU experts without biases
    loss = α · mean over sequences of Σ_e f_e P_e,  with, for a sequence of n valid tokens,
           f_e = E/(k n) · #{t : e ∈ top-k(s_t)},  P_e = 1/n Σ_t s_{t,e} / Σ_j s_{t,j}
    b_e ← b_e + γ · sign(mean(c) − c_e)  after each optimizer step,  c_e the assignments of the whole global batch

Choices: f_e counts the choice without b, as in the report, so that the loss keeps acting on the scores once b has
balanced the load; its gradient flows only through P. ρ = 1: the report's 2.5 goes with 8 of 256 experts. Several shared
experts are one SwiGLU of their joint width, which is the same function. Quotients of sigmoids are computed as softmaxes
of log-sigmoids, which are equal and never 0/0. Nothing is dropped. There is no public training code: the loss and the
bias rule follow the report, with a constant γ (the report ends training with γ = 0: ``bias_speed=0``). Node-limited
routing, which only serves expert parallelism, is left out. The sigmoid and b are in float32 or wider.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.layer import Result, Routing
from intbmoe.parts.losses import global_sum
from intbmoe.parts.router import mask_choices, top_k
from intbmoe.parts.shared import SharedConfig, SharedLayer
from intbmoe.parts.state import WideBuffers
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import NonNegative, PositiveInt


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(SharedConfig):
    """Top-k routing with a bias on the choice, plus shared experts."""

    experts: PositiveInt = 16
    """E, routed experts; shared ones come on top."""
    shared_hidden: PositiveInt | None = None
    """Inner width of one shared expert; None for that of a routed expert."""
    bias_speed: NonNegative = 1e-3
    """γ, how far an expert's bias moves per step."""
    balance: float = 1e-4
    """α, the coefficient of the sequence-wise balance loss."""
    route_scale: float = 1.0
    """ρ, the sum of the weights of a token's routed experts."""

    @property
    def shared_width(self) -> int:
        return self.shared_experts * (self.shared_hidden or self.hidden)


@register(
    "deepseek", title="DeepSeek-V3", paper="DeepSeek-AI, 2024", code="deepseek-ai/DeepSeek-V3", participation="sparse"
)
class DeepSeek(WideBuffers, SharedLayer):
    """Top-k token choice balanced by a bias on the choice, with a shared expert."""

    Config = DeepSeekConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("bias", torch.zeros(self.config.experts, dtype=torch.float32))

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        logits = self.router(wide(x)).flatten(0, 1)
        scores = logits.detach().sigmoid()
        log_scores = F.logsigmoid(logits)
        chosen = top_k(scores + self.bias, c.top_k)
        weights = c.route_scale * log_scores.gather(1, chosen).softmax(-1)
        ids = mask_choices(chosen, mask)
        weights = torch.where(ids < 0, 0, weights)
        y, load = self.run_experts(x.reshape(-1, c.dim).to(dtype), ids, weights, complete=mask is None)
        losses = {}
        if self.training:
            shares = log_scores.softmax(-1).view(*x.shape[:2], c.experts)
            unbiased = F.one_hot(top_k(scores, c.top_k), c.experts).sum(1).view_as(shares)
            losses["balance"] = c.balance * sequence_balance(shares, unbiased, mask, c.top_k)
        return Result(y.view(x.shape), Routing(ids, weights), losses, {"load": load})

    @classmethod
    def family_after_step(cls, layers: Sequence[Self], sums: Sequence[dict[str, Tensor]], optimizer: Any) -> None:
        for layer, step in zip(layers, sums, strict=True):
            load = step["load"]
            # E times mean(c) − c_e, in integers, so that an exactly even load moves nothing.
            direction = (load.sum() - load.numel() * load).sign()
            layer.bias += layer.config.bias_speed * direction.to(layer.bias.dtype)


def sequence_balance(shares: Tensor, chosen: Tensor, mask: Tensor | None, k: int) -> Tensor:
    """Shares (B, T, E) that sum to 1, choices (B, T, E) as 0/1 → mean of Σ_e f_e P_e over all ranks' sequences.

    It is 1 if the choices are even. Sequences without a valid token do not count.
    """
    batch, tokens, experts = shares.shape
    if mask is None:
        valid = shares.new_full((batch,), tokens)
    else:
        valid = mask.sum(1).to(shares.dtype)
        shares = torch.where(mask.unsqueeze(-1), shares, 0)
        chosen = torch.where(mask.unsqueeze(-1), chosen, 0)
    length = valid.clamp(min=1).unsqueeze(-1)
    f = chosen.sum(1).to(shares.dtype) * (experts / k) / length
    p = shares.sum(1) / length
    sequences = global_sum((valid > 0).sum().to(shares.dtype)).clamp(min=1)
    return global_sum((f * p).sum()) / sequences
