"""SMEAR: experts are merged by averaging their parameters, and the merged expert runs once.

Muqeeth, Liu and Raffel, "Soft Merging of Experts with Adaptive Routing", TMLR 2024.

    a_b = softmax(W_r v_b),  v_b the mean of sequence b's tokens          ``smear``, level "example"
    y_{b,t} = f(x_{b,t}; Σ_e a_{b,e} θ_e)                                 every weight and bias is merged

    a_{b,t} = softmax(W_r x_{b,t}),  y_{b,t} = f(x_{b,t}; Σ_e a_{b,t,e} θ_e)    ``smear_token``, level "token"

In training each entry of a is independently set to zero with probability ``expert_dropout``, for each example (or
token), and a becomes (a + 1e-10) / Σ(a + 1e-10).

The authors' router also has two LayerNorms, on its input and on each expert's row of W_r, the latter with a gain that
starts at 0.01 (``router_norm=True``):

    a = softmax(LN_w(W_r) LN_x(v))

They are off by default: IntBMoE's Table 1 prints 24.070 M parameters for SMEAR, which means a plain linear map of
192 × 17 in each of four layers; the norms, with 4·192 more parameters per layer, would make 24.073 M. They matter: on
digits the mixture's entropy in the two layers is 0.96 and 0.87 of log E without them, and 0.78 and 0.61 with them.

Choices: the router has no bias. W_r starts as N(0, 0.01²) and expert dropout is 0.1, as in the authors' code. Padding
is left out of the mean; the authors include it. A sequence without a valid token has uniform a. Weight sets are built a
few at a time, and again in the backward pass. The token level never builds one, at the cost of running E experts; on a
GPU the example level does the same if sequences are short (``ops/merged_mm``).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.layer import MoELayer, OnePer, Quantities, Result
from intbmoe.parts.experts import ExpertsConfig
from intbmoe.parts.linear import Linear
from intbmoe.precision import linear, wide
from intbmoe.registry import register
from intbmoe.settings import Share

ROUTER_STD = 0.01
RENORMALISE_EPS = 1e-10


@dataclass(frozen=True, kw_only=True)
class SmearConfig(ExpertsConfig):
    """Experts merged by a weighted mean of their parameters."""

    level: Literal["example", "token"] = "example"
    """Whether each sequence (example) or each token has its own merged expert."""
    expert_dropout: Share = 0.1
    """Probability of leaving an expert out of a merge in training."""
    router_norm: bool = False
    """Normalise the router's input and each expert's row of its weight matrix, as the authors do."""

    def noncausal_reason(self) -> str | None:
        if self.level == "token":
            return None
        return "example-level SMEAR merges by the mean of the whole sequence, later tokens too (smear_token does not)"


@register(
    "smear_token",
    title="SMEAR (token-level)",
    paper="Muqeeth et al., 2024",
    code="r-three/smear",
    participation="dense",
    level="token",
)
@register("smear", title="SMEAR", paper="Muqeeth et al., 2024", code="r-three/smear", participation="dense")
class Smear(MoELayer):
    """One merged expert per sequence, or per token."""

    Config = SmearConfig
    REPLAYS = True
    KEPT_WIDE = ("router", "input_norm", "row_norm")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router = Linear(self.config.dim, self.config.experts, bias=False)
        nn.init.normal_(self.router.weight, std=ROUTER_STD)
        if self.config.router_norm:
            self.input_norm = nn.LayerNorm(self.config.dim)
            self.row_norm = nn.LayerNorm(self.config.dim)
            nn.init.constant_(self.row_norm.weight, ROUTER_STD)
        self.experts = self.config.make_experts()

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        tokens = x.to(dtype)
        if self.config.level == "example":
            return Result(self.experts.merged(tokens, self._coefficients(_mean(wide(x), mask))))
        a = self._coefficients(wide(x).flatten(0, 1))
        return Result(self.experts.merged(tokens.flatten(0, 1).unsqueeze(1), a).view(x.shape))

    def _coefficients(self, routed: Tensor) -> Tensor:
        """(n, d) pooled vectors or tokens → (n, E) coefficients that sum to one."""
        rows = self.router.weight
        if self.config.router_norm:
            routed, rows = _normalise(self.input_norm, routed), _normalise(self.row_norm, wide(rows))
        a = linear(routed, rows).softmax(-1)
        if self.training and self.config.expert_dropout:
            kept = torch.rand_like(a) >= self.config.expert_dropout
            a = torch.where(kept, a, 0) + RENORMALISE_EPS
            a = a / a.sum(-1, keepdim=True)
        return a

    def quantities(self) -> Quantities:
        """By the method's definition; in fact ``ops/merged_mm`` builds a few sets at a time, and none per token."""
        return Quantities(self.config.experts, execution=1, materialization=OnePer(self.config.level))


def _normalise(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """(…, d) → (…, d), in the type of ``x``, whatever type the norm is stored in."""
    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, T, d) tokens, zero where masked → (B, d) mean over the valid ones; zero if there are none."""
    if mask is None:
        return x.sum(1) / max(x.shape[1], 1)
    return x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
