"""HyperMoE: the chosen experts, plus a small network generated from the experts that were not chosen.

Zhao, Qiu, Wu, Wang, He and Fu, "HyperMoE: Towards Better Mixture of Experts via Transferring Among Experts", ACL 2024
(arXiv 2402.12656); official code Bumble666/Hyper_MoE.

    p_t = softmax(W_r x_t),  K_t = top-k(p_t)
    s_t = Σ_{e ∉ K_t} v_e                                           v_e a learned vector of expert e
    u_t = ReLU(H [MLP(s_t)] + h)                                    MLP: linear, ReLU, linear
    D_t, d_t, U_t, c_t = linear maps of u_t                         weights (d × a, a × d) and biases of the HyperExpert
    y_t = Σ_{e ∈ K_t} g_{t,e} f_e(x_t) + U_t ReLU(D_t x_t + d_t) + c_t
    g_t = p_t for k = 1, renormalised over K_t for k = 2            their Switch and their GPT-2
    loss = α·E·Σ_e f_e P_e                                          Switch's balance

A token's HyperExpert depends only on its set K_t. So there are E of them for k = 1 and E(E − 1)/2 for k = 2: all are
generated once per forward and tokens are sorted by set, whereas the authors' code generates one for each token.

Choices: in their code one hypernetwork serves all layers, and a vector tells the layers apart; here each layer has its
own, since a layer does not know the others, and needs no such vector. The maps that generate weights are initialised as
in their code, uniform in ±10⁻³·√(3/(inputs · fan-in)), so that the HyperExpert starts near 0. Their GPT-2 has noisy
gates with importance and load losses (as ``shazeer`` has); here both k use Switch's loss. Nothing is dropped.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.layer import OnePer, Quantities, Result, Routing
from intbmoe.ops.backend import choose_backend
from intbmoe.ops.grouped_mm import grouped_mm
from intbmoe.parts.dispatch import combine, dispatch, spread, to_rows
from intbmoe.parts.experts import ExpertsConfig, RoutedLayer
from intbmoe.parts.linear import Linear
from intbmoe.parts.losses import balance_loss
from intbmoe.parts.router import mask_choices, top_k
from intbmoe.precision import cast, wide
from intbmoe.registry import register
from intbmoe.settings import AtMost, PositiveInt

HEAD_SCALE = 1e-3


@dataclass(frozen=True, kw_only=True)
class HyperMoEConfig(ExpertsConfig):
    """Top-k routing plus a HyperExpert."""

    top_k: Annotated[Literal[1, 2], AtMost("experts")] = 1
    """k, experts per token."""
    embedding_dim: PositiveInt = 128
    """Width of an expert's vector, and of the MLP that reads the sum of the unchosen experts' vectors."""
    hyper_dim: PositiveInt = 128
    """Inner width of the hypernetwork."""
    adapter_dim: PositiveInt = 64
    """a, inner width of the HyperExpert."""
    balance: float = 0.01
    """α, the coefficient of the load-balancing loss."""


@register("hypermoe", title="HyperMoE", paper="Zhao et al., 2024", code="Bumble666/Hyper_MoE", participation="dense")
class HyperMoE(RoutedLayer):
    """Top-k token choice, plus a generated network that represents the experts not chosen."""

    Config = HyperMoEConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.embeddings = nn.Parameter(torch.randn(c.experts, c.embedding_dim))
        widths = (c.embedding_dim, c.embedding_dim, c.embedding_dim, c.hyper_dim)
        self.hypernetwork = nn.ModuleList(Linear(a, b) for a, b in pairwise(widths))
        sizes = {"down": (c.dim, c.adapter_dim), "up": (c.adapter_dim, c.dim)}
        self.weights = nn.ModuleDict({name: Linear(c.hyper_dim, a * b) for name, (a, b) in sizes.items()})
        self.biases = nn.ModuleDict({name: Linear(c.hyper_dim, b) for name, (_, b) in sizes.items()})
        for name, (fan_in, _) in sizes.items():
            for head, inputs in ((self.weights[name], c.hyper_dim * fan_in), (self.biases[name], c.hyper_dim)):
                bound = HEAD_SCALE * math.sqrt(3 / inputs)
                nn.init.uniform_(head.weight, -bound, bound)
                nn.init.zeros_(head.bias)

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        probabilities = self.router(wide(x)).softmax(-1).flatten(0, 1)
        chosen = top_k(probabilities, c.top_k)
        ids = mask_choices(chosen, mask)
        weights = probabilities.gather(1, chosen)
        if c.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = torch.where(ids < 0, 0, weights)
        tokens = x.flatten(0, 1).to(dtype)
        y, load = self.experts.route(tokens, ids, weights, complete=mask is None)
        y = y + self._hyper_expert(tokens, mask_choices(_set_of(chosen), mask), mask is None)
        losses = {}
        if self.training:
            losses["balance"] = c.balance * balance_loss(probabilities, load, mask)
        return Result(y.view(x.shape), Routing(ids, weights), losses, {"load": load})

    def _hyper_expert(self, tokens: Tensor, sets: Tensor, complete: bool) -> Tensor:
        """(N, d) tokens and (N, 1) sets, −1 for none → (N, d) in the wide type."""
        c = self.config
        member = _sets(c.experts, c.top_k, tokens.device)
        vectors = wide(self.embeddings)
        u = (1 - member).to(vectors.dtype) @ vectors
        first, second, last = self.hypernetwork
        u = last(second(first(u).relu())).relu()
        plan = dispatch(sets, len(member), choose_backend(tokens), complete)
        z = to_rows(tokens, plan)
        for name, (a, b) in (("down", (c.dim, c.adapter_dim)), ("up", (c.adapter_dim, c.dim))):
            made = cast(self.weights[name](u), z.dtype).view(-1, a, b)
            z = grouped_mm(z, made, plan.ends, plan.backend, complete=plan.complete)
            z = z + spread(cast(self.biases[name](u), z.dtype), plan)
            z = F.relu(z) if name == "down" else z
        return combine(z, wide(z).new_ones(sets.shape), plan)

    def quantities(self) -> Quantities:
        """All experts contribute to a token's output: those not chosen contribute through the HyperExpert."""
        return Quantities(self.config.experts, execution=self.config.top_k + 1, materialization=OnePer("token"))


def _sets(experts: int, k: int, device: torch.device) -> Tensor:
    """(sets, E) as 0/1: all sets of k experts, in the order of ``_set_of``."""
    every = torch.eye(experts, dtype=torch.int64, device=device)
    if k == 1:
        return every
    high, low = torch.tril_indices(experts, experts, -1, device=device)
    return every[high] + every[low]


def _set_of(chosen: Tensor) -> Tensor:
    """(N, k) distinct experts → (N, 1), the index of their set: e for {e}, j(j − 1)/2 + i for {i, j} with i < j."""
    low, high = chosen.amin(-1, keepdim=True), chosen.amax(-1, keepdim=True)
    return low if chosen.shape[-1] == 1 else high * (high - 1) // 2 + low
