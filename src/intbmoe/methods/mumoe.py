"""μMoE: all experts contribute, through one low-rank tensor of their weights.

Oldfield, Georgopoulos, Chrysos, Tzelepis, Panagakis, Nicolaou, Deng and Patras, "Multilinear Mixture of Experts:
Scalable Expert Specialization through Factorization", NeurIPS 2024.

    gate     a_t = entmax_{1.5}(LN(G^T x_t))                   one gate for both layers, G (d × E), LN without affine
    block    y_t = M_2(GELU(M_1(x_t, a_t)), a_t)
    layer    M(z, a)_o = Σ_e a_e Σ_i W[e, i, o] z̃_i            z̃ = [z; 1]: the biases are the last input row

The tensor W is never built; it is factored as (A, B, C: experts, inputs, outputs)

    CP   W[e, i, o] = Σ_r A[e, r] B[i, r] C[o, r]               M = C ((A^T a) ⊙ (B^T z̃))
    TR   W[e, i, o] = tr(A[e] B[i] C[o]^T)                      M_o = ⟨(Σ_e a_e A[e]) (Σ_i z̃_i B[i]), C[o]⟩
         with A[e] (R_1 × R_2), B[i] (R_2 × R_3), C[o] (R_1 × R_3)

entmax gives exact zeros, so a token may give experts no weight, but nothing is skipped: participation counts as E.

Initialisation: G = 0, hence a = 1/E at step 0 (and scores of size ±1 after the first step, because of the norm);
A ~ N(1, 1) in CP, diagonal matrices of N(1, 1) in TR; B ~ U(±1/√inputs), including its bias row; C ~ U(±1/√(ranks it
sums over)).

Choices. The gate is normalised by LayerNorm, as in the authors' language models. Their default for images is BatchNorm
without affine (``gate_norm="batch"``): an expert's scores are normalised over the valid tokens of a forward on all
ranks, and in evaluation by running means, which move by a tenth after each step (theirs: in each forward). In training
this makes a token depend on later ones, so a causal model refuses it. CP shares the expert factor A between both layers
(``share_expert_factor``): the authors' code has one per layer, but the parameter count that the IntBMoE paper prints
for CP fits one shared factor with R = 2594, and no rank with two factors. TR is laid out as in the authors' code,
except that factors hold their mode first, (E, R_1, R_2) instead of (R_1, E, R_2), so that each is applied as a matrix,
and that the bias row is added, not multiplied by a column of ones. There is one level of experts. The LayerNorm on the
experts' input in their GPT-2, which replaces the block's norm, is left to the host model.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.layer import LayerConfig, Quantities, Result
from intbmoe.parts.entmax import entmax15
from intbmoe.parts.losses import count_valid, global_sum, masked_sum
from intbmoe.parts.state import WideBuffers
from intbmoe.precision import linear, wide
from intbmoe.registry import register
from intbmoe.settings import PositiveInt

MOMENTUM = 0.1  # of BatchNorm's running means, torch's default


@dataclass(frozen=True)
class MuMoEConfig(LayerConfig):
    """Options of both factorisations."""

    hidden: PositiveInt
    """Width between the two layers."""
    _: KW_ONLY
    experts: PositiveInt = 8
    """E, the number of experts."""
    rank: PositiveInt | None = None
    """R of CP, R_3 of TR, which sets the size of the layer; None for the authors' fraction of dim."""
    gate_norm: Literal["layer", "batch"] = "layer"
    """The norm of the gate's scores: LayerNorm over experts, or BatchNorm over tokens (the authors' for images)."""
    gate_affine: bool = False
    """Give the gate's norm a gain and a bias."""

    RANK_SHARE: ClassVar[float] = 0.75
    """The authors' rank as a fraction of dim, used if rank is None."""

    def noncausal_reason(self) -> str | None:
        if self.gate_norm == "layer":
            return None
        return "in training its gate is normalised over all tokens, also later ones (gate_norm='layer' is causal)"

    @property
    def resolved_rank(self) -> int:
        return self.rank or math.ceil(self.RANK_SHARE * self.dim)


@dataclass(frozen=True, kw_only=True)
class CPConfig(MuMoEConfig):
    """CP decomposition."""

    share_expert_factor: bool = True
    """One expert factor A for both layers; False gives each its own, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class TRConfig(MuMoEConfig):
    """Tensor ring."""

    ring_ranks: tuple[PositiveInt, PositiveInt] = (4, 4)
    """R_1, R_2: how well the layer can distinguish experts."""

    RANK_SHARE: ClassVar[float] = 0.2


def _uniform(*shape: int, fan: int) -> nn.Parameter:
    """A factor that starts as U(±1/√fan)."""
    return nn.Parameter(torch.empty(*shape).uniform_(-1 / math.sqrt(fan), 1 / math.sqrt(fan)))


def _affine(z: Tensor, factor: Tensor) -> Tensor:
    """(N, I) inputs and an (I + 1, R) factor → (N, R), the product with [z; 1]."""
    factor = factor.to(z.dtype)
    return torch.addmm(factor[-1], z, factor[:-1])


class CPFactors(nn.Module):
    """B and C of one CP layer."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.inputs = _uniform(inputs + 1, rank, fan=inputs)
        self.outputs = _uniform(outputs, rank, fan=rank)

    def forward(self, z: Tensor, coefficients: Tensor) -> Tensor:
        """(N, I) inputs and (N, R) coefficients A^T a → (N, O), in the type of ``z``."""
        return linear(coefficients.to(z.dtype) * _affine(z, self.inputs), self.outputs)


class TRFactors(nn.Module):
    """A, B and C of one tensor-ring layer."""

    def __init__(self, experts: int, inputs: int, outputs: int, ranks: tuple[int, int, int]) -> None:
        super().__init__()
        r1, r2, r3 = ranks
        self.experts = nn.Parameter(torch.eye(r1, r2) * (1 + torch.randn(experts, r1, r2)))
        self.inputs = _uniform(inputs + 1, r2, r3, fan=inputs)
        self.outputs = _uniform(outputs, r1, r3, fan=r1 * r3)

    def forward(self, z: Tensor, a: Tensor) -> Tensor:
        """(N, I) inputs and (N, E) gate weights → (N, O), in the type of ``z``."""
        mixed = (a @ self.experts.flatten(1).to(a.dtype)).unflatten(-1, self.experts.shape[1:])
        inner = _affine(z, self.inputs.flatten(1)).unflatten(-1, self.inputs.shape[1:])
        return linear(torch.bmm(mixed.to(z.dtype), inner).flatten(1), self.outputs.flatten(1))


class MuMoE(WideBuffers):
    """The gate and the interface of the block; a subclass holds the factors and computes the block."""

    Config = MuMoEConfig
    DECAY_GROUPS: ClassVar = {"gate": "routers"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.gate = nn.Parameter(torch.zeros(c.dim, c.experts))
        self.gate_norm = nn.LayerNorm(c.experts, elementwise_affine=c.gate_affine)  # also holds BatchNorm's affine
        if c.gate_norm == "batch":
            self.register_buffer("gate_mean", torch.zeros(c.experts))
            self.register_buffer("gate_variance", torch.ones(c.experts))

    def block(self, x: Tensor, a: Tensor) -> Tensor:
        """(N, d) tokens and (N, E) gate weights in the wide type → (N, d), in the type of ``x``."""
        raise TypeError(f"{type(self).__name__} does not define block()")

    def gate_weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(N, d) tokens and a validity mask with N entries → (N, E) weights a, in the wide type."""
        scores, norm = self._scores(x), self.gate_norm
        affine = (wide(norm.weight), wide(norm.bias)) if self.config.gate_affine else (None, None)
        if self.config.gate_norm == "layer":
            return entmax15(F.layer_norm(scores, norm.normalized_shape, *affine, norm.eps))
        mean, variance = self.gate_mean, self.gate_variance
        if self.training:
            count = global_sum(count_valid(scores.unsqueeze(0), mask).to(scores.dtype)).clamp(min=1)
            mean = global_sum(masked_sum(scores, mask)) / count
            variance = global_sum(masked_sum((scores - mean).square(), mask)) / count
        normal = (scores - mean) * (variance + norm.eps).rsqrt()
        return entmax15(normal if affine[0] is None else normal * affine[0] + affine[1])

    def _scores(self, x: Tensor) -> Tensor:
        return wide(x) @ self.gate.to(wide(x).dtype)

    @torch.no_grad()
    def _gate_sums(self, x: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Sums that update the running means: of scores relative to the means, so that squares lose no digits."""
        distance = self._scores(x) - self.gate_mean
        return {"gate": masked_sum(distance, mask), "gate_squares": masked_sum(distance.square(), mask)}

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        tokens = x.reshape(-1, self.config.dim)
        y = self.block(tokens.to(dtype), self.gate_weights(tokens, mask)).view(x.shape)
        moving = self.training and self.config.gate_norm == "batch"
        return Result(y, sums=self._gate_sums(tokens, mask) if moving else {})

    @classmethod
    @torch.no_grad()
    def family_after_step(cls, layers: Sequence[Self], sums: Sequence[dict[str, Tensor]], optimizer: Any) -> None:
        for layer, recorded in zip(layers, sums, strict=True):
            if layer.config.gate_norm == "batch":
                count = recorded["tokens"]
                shift, squares = recorded["gate"] / count.clamp(min=1), recorded["gate_squares"]
                unbiased = (squares - count * shift.square()) / (count - 1).clamp(min=1)
                share = MOMENTUM * (count > 1).to(layer.gate_mean.dtype)  # one token has no variance
                layer.gate_variance += share * (unbiased - layer.gate_variance)
                layer.gate_mean += share * shift

    def quantities(self) -> Quantities:
        return Quantities(participation=self.config.experts, execution=1, materialization=0)


@register(
    "mumoe_cp", title="μMoE (CP)", paper="Oldfield et al., 2024", code="james-oldfield/muMoE", participation="dense"
)
class CPMuMoE(MuMoE):
    """μMoE in CP form."""

    Config = CPConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c, rank = self.config, self.config.resolved_rank
        copies = 1 if c.share_expert_factor else 2
        self.experts = nn.ParameterList(nn.Parameter(1 + torch.randn(c.experts, rank)) for _ in range(copies))
        self.first = CPFactors(c.dim, c.hidden, rank)
        self.second = CPFactors(c.hidden, c.dim, rank)

    def block(self, x: Tensor, a: Tensor) -> Tensor:
        coefficients = [a @ factor.to(a.dtype) for factor in self.experts]  # one for both layers, or one each
        return self.second(F.gelu(self.first(x, coefficients[0])), coefficients[-1])


@register(
    "mumoe_tr", title="μMoE (TR)", paper="Oldfield et al., 2024", code="james-oldfield/muMoE", participation="dense"
)
class TRMuMoE(MuMoE):
    """μMoE in tensor-ring form."""

    Config = TRConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        ranks = (*c.ring_ranks, c.resolved_rank)
        self.first = TRFactors(c.experts, c.dim, c.hidden, ranks)
        self.second = TRFactors(c.experts, c.hidden, c.dim, ranks)

    def block(self, x: Tensor, a: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x, a)), a)
