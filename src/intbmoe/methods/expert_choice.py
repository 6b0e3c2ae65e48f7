"""Expert Choice: each expert takes the tokens it scores highest, so that all experts are equally loaded.

Zhou, Lei, Liu, Du, Huang, Zhao, Dai, Chen, Le and Laudon, "Mixture-of-Experts with Expert Choice Routing", NeurIPS
2022. For each sequence of n valid tokens:

    P = softmax_e(X W_rᵀ) ∈ R^{n×E}                        over the experts
    I_e = top-C_t(P_{t,e}),  C = ⌈cf · n / E⌉               the C tokens of expert e; at most n
    y_t = Σ_{e : t ∈ I_e} P_{t,e} f_e(x_t)                 not renormalised; 0 for a token that no expert took

There is no auxiliary loss: the load is balanced by construction. The statistic ``untaken`` counts the valid tokens that
no expert took. Choices: experts choose within one sequence, so that a result does not depend on its batch (the authors:
within the device's batch). C is rounded up to an integer, not to a multiple, and computed from the valid tokens. Ties
go to the earlier token. There is no noise on the logits, as in the paper. The paper's cap on the experts of a token (a
linear program, off by default there) is left out.

An expert sees all tokens of a sequence before it chooses, so a later token can displace an earlier one. The method is
therefore not for causal models, unless cf ≥ E, when every expert takes every token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intbmoe.layer import Result, Routing
from intbmoe.parts.dispatch import capacity_of, exact_ratio, seat, sum_seats, to_seats
from intbmoe.parts.experts import ExpertsConfig, RoutedLayer
from intbmoe.parts.router import pack_choices
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import Positive


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceConfig(ExpertsConfig):
    """Top-C tokens for each expert."""

    capacity_factor: Positive = 2.0
    """cf, the mean number of experts per token (before C is rounded up)."""

    def noncausal_reason(self) -> str | None:
        if self.capacity_factor >= self.experts:
            return None
        return "an expert chooses among all tokens of a sequence, so a later token can displace an earlier one"


@register(
    "expert_choice", title="Expert Choice", paper="Zhou et al., 2022", code="google/flaxformer", participation="sparse"
)
class ExpertChoice(RoutedLayer):
    """Experts choose tokens."""

    Config = ExpertChoiceConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._factor = exact_ratio(self.config.capacity_factor)

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        batch, tokens, _ = x.shape
        gates = self.router(wide(x)).softmax(-1)  # (B, T, E)
        taken, filled = self._choose(gates.detach(), mask)  # (B, C, E)

        # Seat (e, b, j) has the j-th token that expert e took from sequence b. An unfilled seat computes some token of
        # its sequence with weight 0: shapes stay fixed, and it affects neither outputs nor gradients.
        first = tokens * torch.arange(batch, device=x.device).view(-1, 1, 1)
        plan = seat((taken + first).permute(2, 0, 1).reshape(-1), batch * tokens)
        weights = torch.where(filled, gates.gather(1, taken), 0).permute(2, 0, 1).reshape(-1, 1)
        z = to_seats(x.reshape(-1, c.dim).to(dtype), plan)
        z = self.experts.batch(z.view(c.experts, batch * taken.shape[1], c.dim)).reshape(-1, c.dim)
        y = sum_seats(z * weights, plan)

        chosen = torch.zeros_like(gates, dtype=torch.bool).scatter(1, taken, filled).flatten(0, 1)
        ids, token_weights = pack_choices(gates.flatten(0, 1), chosen)
        untaken = ~chosen.any(1) if mask is None else mask.reshape(-1) & ~chosen.any(1)
        sums = {"load": filled.sum((0, 1)), "untaken": untaken.sum()}
        return Result(y.view(x.shape), Routing(ids, token_weights), sums=sums)

    def _choose(self, gates: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gates (B, T, E) → (B, C, E) each expert's tokens, best first, and whether the seat is filled.

        C is computed from T, so that the shape is fixed; a sequence with padding fills only as many seats as its valid
        tokens allow.
        """
        _, tokens, experts = gates.shape
        capacity = min(tokens, capacity_of(self._factor, tokens, experts))
        if mask is not None:
            gates = torch.where(mask.unsqueeze(-1), gates, -torch.inf)
        taken = gates.sort(dim=1, descending=True, stable=True).indices[:, :capacity]
        if mask is None:
            return taken, torch.ones_like(taken, dtype=torch.bool)
        valid = mask.sum(1)
        allowed = torch.minimum(valid, capacity_of(self._factor, valid, experts)).view(-1, 1, 1)
        rank = torch.arange(capacity, device=gates.device).view(1, -1, 1)
        return taken, (rank < allowed).expand_as(taken)

    @property
    def executed(self) -> float:
        return min(self.config.capacity_factor, self.config.experts)
