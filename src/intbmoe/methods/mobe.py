"""MoBE: the experts' first matrices are built from basis matrices that all experts share.

Chen, Ha, Lan, Zhang and Li, "MoBE: Mixture-of-Basis-Experts for Compressing MoE-based LLMs", 2025 (arXiv 2508.05257);
official code inclusionAI/MoBE. Of all methods here it is the closest to IntBMoE, which composes blocks from a pool of
experts; MoBE composes the experts themselves from a pool of bases.

    W_e = A_e φ(Σ_i α_{e,i} B_i),  α_e = softmax(a_e)               m bases B_i (r × d), A_e (h × r) the expert's own
    f_e(x) = V_e GELU(W_e x + b_e) + c_e                            SwiGLU: gate and up likewise, each with own bases
    y_t = Σ_{e ∈ K_t} g_{t,e} f_e(x_t)                              top-k, renormalised: ``mixtral``'s router and loss

The paper compresses a trained mixture by fitting A, α and B to its matrices. Here the same form is trained from
scratch, like the other methods. As in the paper, the last matrix V_e is not factorised.

Choices: φ is SiLU or tanh (the code has both; the formula in the README has none: ``activation="none"``). In the paper
the router is the host model's. A composed matrix starts with about the variance of ``nn.Linear``: a_e ~ N(0, 1), so
that Σ α² ≈ e/m, and bases ~ N(0, c²·m/(e·d)), with c = 2 for SiLU, which halves small numbers, and 1 otherwise.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.layer import Quantities
from intbmoe.methods.mixtral import Mixtral, MixtralConfig
from intbmoe.ops.grouped_mm import grouped_mm
from intbmoe.ops.permute import Permutation
from intbmoe.parts.experts import FFNExperts, StackedExperts, StackedLinear
from intbmoe.precision import cast, wide
from intbmoe.registry import register
from intbmoe.settings import PositiveInt

Activation = Literal["silu", "tanh", "none"]
ACTIVATIONS = {"silu": F.silu, "tanh": torch.tanh, "none": lambda z: z}


@dataclass(frozen=True, kw_only=True)
class MoBEConfig(MixtralConfig):
    """Experts built from shared bases."""

    bases: PositiveInt = 4
    """m, the number of basis matrices per factorised matrix."""
    rank: PositiveInt | None = None
    """r, rows of a basis; None for half the width of a token."""
    activation: Activation = "silu"
    """φ, applied to the sum of bases."""

    def make_experts(self) -> StackedExperts:
        experts = super().make_experts()
        factorised = ("up",) if isinstance(experts, FFNExperts) else ("gate", "up")
        for name in factorised:
            setattr(experts, name, BasisLinear(self, bias=isinstance(experts, FFNExperts)))
        return experts


class BasisLinear(nn.Module):
    """E linear maps d → h, applied as z φ(Σ α B) A: first a matrix composed of m bases, then the expert's own A."""

    def __init__(self, config: MoBEConfig, bias: bool) -> None:
        super().__init__()
        self.activation = config.activation
        rank = config.rank or max(1, config.dim // 2)
        self.bases = nn.Parameter(torch.empty(config.bases, config.dim, rank))
        self.mixing = nn.Parameter(torch.randn(config.experts, config.bases))
        small = 2 if self.activation == "silu" else 1
        nn.init.normal_(self.bases, std=small * math.sqrt(config.bases / (math.e * config.dim)))
        self.own = StackedLinear(config.experts, rank, config.hidden, bias)

    def composed(self) -> Tensor:
        """(E, d, r) in the wide type: φ(Σ_i α_{e,i} B_i)."""
        shares = wide(self.mixing).softmax(-1)
        return ACTIVATIONS[self.activation](torch.einsum("em,mdr->edr", shares, wide(self.bases)))

    def forward(self, z: Tensor, way: Literal["rows"], plan: Permutation) -> Tensor:
        """(M, d) rows sorted by expert → (M, h)."""
        z = grouped_mm(z, cast(self.composed(), z.dtype), plan.ends, plan.backend, complete=plan.complete)
        return self.own(z, way, plan)


@register("mobe", title="MoBE", paper="Chen et al., 2025", code="inclusionAI/MoBE", participation="sparse")
class MoBE(Mixtral):
    """Top-k token choice of experts whose first matrices are composed of shared bases."""

    Config = MoBEConfig
    REPLAYS = True
    REFUSES: ClassVar = {"experts": "its experts are built from basis matrices that all of them share"}

    def quantities(self) -> Quantities:
        """One matrix is built from the bases for each expert, whatever the input."""
        c = self.config
        return Quantities(participation=c.top_k, execution=c.top_k, materialization=c.experts)

    def active_parameters(self) -> int:
        """All bases, and the parameters that belong to the chosen experts."""
        c = self.config
        own = sum(p.numel() for name, p in self.experts.named_parameters() if not name.endswith("bases"))
        return sum(p.numel() for p in self.parameters()) - own * (c.experts - c.top_k) // c.experts
