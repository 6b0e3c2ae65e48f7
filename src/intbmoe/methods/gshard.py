"""GShard: each token's best two experts, the second kept at random.

Lepikhin, Lee, Xu, Chen, Firat, Huang, Krikun, Shazeer and Chen, "GShard: Scaling Giant Models with Conditional
Computation and Automatic Sharding", ICLR 2021, Algorithm 1; ``Top2GatingOnLogits`` of lingvo's gshard_layers.py is
their code.

    p_t = softmax(W_r x_t),  a = argmax_e p_{t,e},  b = argmax_{e ≠ a} p_{t,e}
    g_a = p_{t,a} / (p_{t,a} + p_{t,b} + 10⁻⁹),  g_b likewise
    b is kept if u_t < g_b / θ,  u_t ~ U(0, 1)                      in training; θ = 1/2 gives the paper's 2·g_b
    y_t = g_a f_a(x_t) + g_b f_b(x_t)                               a choice that is not kept gives nothing
    loss = α·E·Σ_e f_e P_e,  f_e the share of tokens with a = e, before any dropping;  P_e the mean of p_{t,e}

``capacity_factor`` gives an expert ⌊cf·T/E⌋ places per sequence, rounded up to a multiple of 4 and at least 4, as in
lingvo (the paper's 2T/E is cf = 2). The first choices of all tokens are placed in token order, then the second choices.
A full expert gives 0.

Choices: dropless by default, and in evaluation the second choice is always kept. The weights are divided by their sum
before any choice is dropped, which is lingvo's default; with ``renormalize="after"``, as in its newer form and
DeepSpeed's ``top2gating``, the remaining weights sum to 1. ``second="sample"`` draws b by its probability among the
others (Gumbel-max), which is lingvo's policy "sampling". Lingvo averages the losses of groups of tokens; here one
statistic covers all valid tokens of all ranks. Mesh TensorFlow has θ = 0.2. The router has no bias.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from intbmoe.layer import Result, Routing
from intbmoe.parts.capacity import CapacityConfig, CapacityLayer
from intbmoe.parts.dispatch import limit_capacity
from intbmoe.parts.losses import balance_loss
from intbmoe.parts.router import count_choices
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import MustBe, Positive

Second = Literal["random", "all", "sample"]
EPS = 1e-9
CAPACITY_MULTIPLE = 4


@dataclass(frozen=True, kw_only=True)
class GShardConfig(CapacityConfig):
    """Top-2 routing."""

    experts: Annotated[int, MustBe("an integer of at least 2", lambda value: value >= 2)] = 8
    """E, the number of experts."""
    second: Second = "random"
    """The second choice in training: "random" keeps it at random, "all" always, "sample" draws the expert itself."""
    threshold: Positive = 0.5
    """θ, the weight at which a random second choice is always kept."""
    renormalize: Literal["before", "after"] = "before"
    """Divide the weights by their sum before choices are dropped, or divide the remaining ones afterwards."""
    balance: float = 0.01
    """α, the coefficient of the load-balancing loss."""


@register("gshard", title="GShard", paper="Lepikhin et al., 2021", code="tensorflow/lingvo", participation="sparse")
class GShard(CapacityLayer):
    """Top-2 token choice whose second choice is kept at random."""

    Config = GShardConfig
    REPLAYS = True
    executed = 2

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        logits = self.router(wide(x))
        second = c.second if self.training else "all"
        uniforms = None
        if second != "all":
            uniforms = torch.rand_like(logits if second == "sample" else logits[..., 0])
        capacity = self._capacity(x, mask)
        kept, weights, wanted = top2_gating(
            logits, mask, capacity=capacity, second=second, threshold=c.threshold, uniforms=uniforms,
            renormalize=c.renormalize,
        )  # fmt: skip
        ids, weights = kept.flatten(0, 1), weights.flatten(0, 1)
        complete = mask is None and capacity is None and second != "random"
        y, load = self.experts.route(x.flatten(0, 1).to(dtype), ids, weights, complete=complete)
        losses = {}
        if self.training:
            first = count_choices(wanted[..., 0], c.experts)
            losses["balance"] = c.balance * balance_loss(logits.softmax(-1).flatten(0, 1), first, mask)
        sums = {"load": load, "dropped": (wanted >= 0).sum() - load.sum()}
        return Result(y.view(x.shape), Routing(ids, weights), losses, sums)

    def _capacity(self, x: Tensor, mask: Tensor | None) -> int | Tensor | None:
        places = self.places(x, mask, 1)
        return None if places is None else -(-places // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def top2_gating(
    logits: Tensor,
    mask: Tensor | None = None,
    *,
    capacity: int | Tensor | None = None,
    second: Second = "all",
    threshold: float = 0.5,
    uniforms: Tensor | None = None,
    renormalize: Literal["before", "after"] = "before",
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, E) logits → ids (B, T, 2), −1 for none; their weights; and the ids before the capacity limit.

    ``capacity`` is the number of places that an expert has per sequence, or one number for each sequence (B, 1).
    ``uniforms`` in [0, 1) decide the second choice: (B, T) for "random", (B, T, E) for "sample".
    """
    gates = logits.softmax(-1)
    order = gates.detach().sort(dim=-1, descending=True, stable=True).indices  # ties by index
    chosen = order[..., :2]
    if second == "sample":
        noise = -torch.log(-torch.log(uniforms))
        others = torch.where(torch.arange(gates.shape[-1], device=gates.device) == chosen[..., :1], -torch.inf, logits)
        chosen = torch.stack([chosen[..., 0], (others.detach() + noise).argmax(-1)], dim=-1)
    weights = gates.gather(-1, chosen)
    if renormalize == "before":
        weights = weights / (weights.sum(-1, keepdim=True) + EPS)
    wanted = chosen if mask is None else torch.where(mask.unsqueeze(-1), chosen, -1)
    if second == "random":
        keep = uniforms < weights[..., 1].detach() / threshold
        wanted = torch.stack([wanted[..., 0], torch.where(keep, wanted[..., 1], -1)], dim=-1)
    ids = wanted if capacity is None else limit_capacity(wanted, gates.shape[-1], capacity)
    weights = torch.where(ids < 0, 0, weights)
    if renormalize == "after":
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1)
    return ids, weights, wanted
