"""Soft MoE: experts process slots, each a weighted mean of all tokens; with a causal form for sequence models.

Puigcerver, Riquelme, Mustafa and Houlsby, "From Sparse to Soft Mixtures of Experts", ICLR 2024.

    L_{t,es} = scale·⟨u(x_t), u(φ_es)⟩,  u(v) = v / sqrt(Σv² + 1e-6),  E experts with p slots each
    D = softmax of L over the tokens t,  C = softmax of L over all E·p slots
    x̃_es = Σ_t D_{t,es} x_t,   y_t = Σ_es C_{t,es} f_e(x̃_es)

The logits are bounded by |scale|, one learned number that starts at 1. Slots mix x itself, not u(x).

``soft_causal`` is IntBMoE's adaptation for its language and travel tasks. The paper says only that a slot is built from
the current and earlier tokens and that an expert has one slot. Our reading: every position has its own slots,

    x̃_{t,e} = Σ_{j≤t} exp(L_{j,e}) x_j / Σ_{j≤t} exp(L_{j,e}),   y_t = Σ_e C_{t,e} f_e(x̃_{t,e})

so that every token runs all E experts. Both sums are running sums kept in the decoding state, so tokens may arrive one
by one. With one slot per expert, the last position's slots are those of ``soft``.

Choices: φ starts as N(0, 1/d) (only its direction matters). Masked tokens enter no slot; a sequence of only masked
tokens gives zero. Everything but the dispatch product is in the wide type (the authors run dispatch and combine in
bfloat16). The number of slots is an option, and there is no noise on the logits (theirs is off by default). The running
sums of exp(L) are safe in float32 up to |scale| of about 70, far from where it starts.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.layer import MoELayer, Quantities, Result
from intbmoe.ops.running_sum import running_sum
from intbmoe.parts.experts import ExpertsConfig
from intbmoe.parts.state import check_batch
from intbmoe.precision import linear, wide
from intbmoe.registry import register
from intbmoe.settings import PositiveInt

EPS = 1e-6
MAX_EXPONENT = 60.0  # exp(60)·T·|x| stays far below float32's largest number; larger logits are shifted down to it


@dataclass(frozen=True, kw_only=True)
class SoftConfig(ExpertsConfig):
    """Slots that are weighted means of tokens."""

    slots: PositiveInt = 1
    """p, slots per expert."""
    causal: bool = False
    """Build each position's slots only from the current and earlier tokens; needs one slot per expert."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.causal or self.slots == 1, "slots", self.slots, "1 when causal=True")

    def noncausal_reason(self) -> str | None:
        if self.causal:
            return None
        return "every slot of Soft MoE mixes all tokens of the sequence, later ones too (soft_causal does not)"


@dataclass
class SoftState:
    """What a causal layer keeps of earlier tokens: the two running sums of every expert's slot."""

    numerator: Tensor  # (E, B, d), Σ_j exp(L_{j,e}) x_j
    denominator: Tensor  # (E, B), Σ_j exp(L_{j,e})


@register(
    "soft_causal",
    title="Soft MoE (causal)",
    paper="Puigcerver et al., 2024",
    code="google-research/vmoe",
    participation="dense",
    causal=True,
)
@register("soft", title="Soft MoE", paper="Puigcerver et al., 2024", code="google-research/vmoe", participation="dense")
class Soft(MoELayer):
    """Each expert processes weighted means of the tokens; each output is a weighted mean of the experts' outputs."""

    Config = SoftConfig
    REPLAYS = True
    DECAY_GROUPS: ClassVar = {"phi": "routers", "scale": "scales"}
    REFUSES: ClassVar = {}  # slots, not tokens, are sent to experts

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.phi = nn.Parameter(torch.randn(c.experts, c.slots, c.dim) * c.dim**-0.5)
        self.scale = nn.Parameter(torch.ones(1))  # FSDP2 shards no scalars
        self.experts = c.make_experts()

    def fit_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Adopt a trained model's number of slots: ``match_budget`` truncated in earlier versions, and now rounds."""
        phi = state.get(f"{prefix}phi")
        if self.training or phi is None or phi.dim() != 3 or phi.shape[::2] != self.phi.shape[::2]:
            return  # training cannot continue with another number: the optimizer holds the parameter
        if phi.shape != self.phi.shape:
            self.config = replace(self.config, slots=phi.shape[1])
            self.phi = nn.Parameter(self.phi.detach().new_empty(phi.shape), self.phi.requires_grad)

    def compute(self, x: Tensor, mask: Tensor | None, state: SoftState | None, dtype: torch.dtype) -> Result:
        logits = linear(_unit(wide(x)), _unit(wide(self.phi)).flatten(0, 1) * wide(self.scale))
        run = self._causal if self.config.causal else self._whole
        return Result(run(x, logits, mask, state, dtype))

    def _whole(self, x: Tensor, logits: Tensor, mask: Tensor | None, state: None, dtype: torch.dtype) -> Tensor:
        """Tokens (B, T, d) and logits (B, T, E·p) → (B, T, d); each slot mixes all valid tokens."""
        c, batch = self.config, x.shape[0]
        seen = logits
        if mask is not None:
            # The lowest finite number, not −∞: without a valid token D is uniform over tokens of zeros, not NaN.
            seen = torch.where(mask.unsqueeze(-1), logits, torch.finfo(logits.dtype).min)
        slots = torch.bmm(seen.softmax(1).transpose(1, 2).to(dtype), x.to(dtype))
        slots = slots.view(batch, c.experts, c.slots, c.dim).transpose(0, 1)
        out = self.experts.batch(slots.reshape(c.experts, batch * c.slots, c.dim))
        out = out.view(c.experts, batch, c.slots, c.dim).transpose(0, 1).flatten(1, 2)
        return torch.bmm(logits.softmax(-1), out.to(logits.dtype))

    def _causal(
        self, x: Tensor, logits: Tensor, mask: Tensor | None, state: SoftState | None, dtype: torch.dtype
    ) -> Tensor:
        """Tokens (B, T, d) and logits (B, T, E) → (B, T, d); each position's slots mix it and earlier tokens."""
        # The ratio does not depend on the shift, and neither does the gradient.
        shift = (MAX_EXPONENT - wide(self.scale).detach().abs()).clamp(max=0)
        weights = (logits + shift).exp()
        if mask is not None:
            weights = torch.where(mask.unsqueeze(-1), weights, 0)
        weights = weights.movedim(-1, 0)  # (E, B, T)
        numerator = weights.unsqueeze(-1) * x
        denominator = weights
        if state is not None:
            check_batch(state.denominator.shape[1], x.shape[0])
            numerator = torch.cat([state.numerator.unsqueeze(2), numerator], 2)
            denominator = torch.cat([state.denominator.unsqueeze(2), denominator], 2)
        numerator, denominator = running_sum(numerator, 2), running_sum(denominator, 2)
        if state is not None:
            state.numerator, state.denominator = numerator[:, :, -1], denominator[:, :, -1]
            numerator, denominator = numerator[:, :, 1:], denominator[:, :, 1:]
        # The denominator is zero before the first valid token; there the slot is zero and the output masked.
        smallest = torch.finfo(denominator.dtype).tiny
        slots = numerator / torch.where(denominator < smallest, 1, denominator).unsqueeze(-1)
        out = self.experts.batch(slots.to(dtype).flatten(1, 2)).view_as(slots)
        return (logits.softmax(-1).movedim(-1, 0).unsqueeze(-1) * out).sum(0)

    def new_state(self, batch: int) -> SoftState:
        """Empty running sums for ``batch`` sequences. ``forward`` updates them; gradients flow through them."""
        super().new_state(batch)  # refuses the noncausal form
        c = self.config
        zeros = wide(self.phi.detach().new_zeros(c.experts, batch, c.dim))
        return SoftState(zeros, zeros[..., 0])

    def quantities(self) -> Quantities:
        experts = self.config.experts
        return Quantities(participation=experts, execution=experts, materialization=0)


def _unit(v: Tensor) -> Tensor:
    return v * (v.square().sum(-1, keepdim=True) + EPS).rsqrt()
