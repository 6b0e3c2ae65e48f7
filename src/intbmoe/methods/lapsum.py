"""SoftMoE by LapSum: a soft top-k whose weights sum to k and have gradients everywhere.

Zasada et al., 2026 (arXiv 2606.17952), who call it SoftMoE. The operator is from Struski, Bednarczyk, Podolak and
Tabor, "LapSum - One Method to Differentiate Them All: Ranking, Sorting and Top-k Selection", ICML 2025, official code
gmum/LapSum.

    r_t = W_r x_t (+ noise in training)
    p_{t,e} = F((r_{t,e} − b_t)/α),  b_t such that Σ_e p_{t,e} = k  F the CDF of the Laplace law; k may be any number
    y_t = Σ_e p_{t,e} 1[p_{t,e} > τ] f_e(x_t)                       the number of experts varies from token to token
    loss = w·E·Σ_e f_e P_e,  f_e the share of e among all choices,  P_e the mean of p_{t,e}/k

F(z) = e^z/2 for z ≤ 0 and 1 − e^{−z}/2 above. With sorted scores, the sum of all F has a closed form between any two
neighbours, b_t follows from a quadratic equation in e^b, and the derivatives from implicit differentiation: with
q = softmax(−|r − b|/α) and δ = e^{−|r − b|/α}/(2α),

    ∂p_i/∂r_j = δ_i (1[i = j] − q_j),   ∂p_i/∂k = q_i,   ∂p_i/∂α = −δ_i/α (r_i − Σ_j q_j r_j)

Choices: we found code only for the operator, not for the layer, and only third-party notes on the paper, so
temperature, threshold, noise and the coefficient w are ours. k is fixed. The paper also learns k, as a share of a
budget for all layers of a model; a layer here does not know the others. The cap on a token's experts is left out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intbmoe.checks import require
from intbmoe.layer import Result, Routing
from intbmoe.parts.experts import ExpertsConfig, RoutedLayer
from intbmoe.parts.losses import balance_loss
from intbmoe.parts.router import pack_choices
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import NonNegative, Positive, Share


@dataclass(frozen=True, kw_only=True)
class LapSumConfig(ExpertsConfig):
    """Soft top-k routing."""

    top_k: Positive = 2.0
    """k, the sum of a token's weights before truncation; need not be an integer."""
    temperature: Positive = 0.1
    """α, the width of the transition between chosen and not chosen."""
    threshold: Share = 0.02
    """τ, the weight below which an expert is left out."""
    noise: NonNegative = 0.0
    """The standard deviation of the noise on the scores in training."""
    balance: float = 0.01
    """w, the coefficient of the load-balancing loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.top_k < self.experts, "top_k", self.top_k, f"less than experts ({self.experts})")
        most = self.top_k / self.experts  # a token's largest weight is at least this
        require(self.threshold < most, "threshold", self.threshold, f"less than top_k/experts ({most:g})")


@register(
    "lapsum",
    title="SoftMoE (LapSum)",
    paper="Zasada et al., 2026",
    code="gmum/LapSum",
    participation="sparse",
    dynamic=True,
)
class LapSum(RoutedLayer):
    """Every expert whose soft top-k weight exceeds a threshold runs."""

    Config = LapSumConfig
    REPLAYS = True

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        scores = self.router(wide(x)).flatten(0, 1)
        if self.training and c.noise:
            scores = scores + c.noise * torch.randn_like(scores)
        soft = lapsum_topk(scores, c.top_k, c.temperature)
        active = ~(soft <= c.threshold)  # NaN counts as active, so that it is noticed
        if mask is not None:
            active = active & mask.reshape(-1, 1)
        ids, weights = pack_choices(soft, active)
        y, load = self.experts.route(x.flatten(0, 1).to(dtype), ids, weights)
        losses = {}
        if self.training:
            losses["balance"] = c.balance * balance_loss(soft, load, mask, mass=c.top_k)
        return Result(y.view(x.shape), Routing(ids, weights), losses, {"load": load})

    @property
    def executed(self) -> int:
        return max(1, round(self.config.top_k))


def lapsum_topk(scores: Tensor, k: float | Tensor, temperature: float | Tensor) -> Tensor:
    """(…, E) scores → (…, E) weights in (0, 1) that sum to k and grow with the score; 0 < k < E.

    ``k`` is a number, or a tensor of shape (…). Differentiable in all three arguments.
    """
    if not isinstance(k, Tensor):
        require(0 < k < scores.shape[-1], "k", k, f"between 0 and the number of scores ({scores.shape[-1]})")
        k = scores.new_full((), k)  # filled on the device: a host copy would block, and graph capture forbids it
    k = k.to(scores).expand(scores.shape[:-1]).unsqueeze(-1)
    with torch.no_grad():
        b = _solve(scores / temperature, k) * temperature
    # Newton steps from the solution leave its value; the first gives the implicit derivative, the next the second one.
    for _ in range(2):
        z = (scores - b) / temperature
        above = z > 0
        distance = torch.where(above, z, -z)
        # Where the scores leave a gap, e^{-|z|} underflows; relative to the largest of them, the step does not.
        nearest = distance.detach().amin(-1, keepdim=True)
        tails = torch.exp(nearest - distance)
        excess = 2 * (above.sum(-1, keepdim=True) - k) * nearest.clamp(max=80).exp()
        excess = excess + torch.where(above, -tails, tails).sum(-1, keepdim=True)
        b = b + temperature * excess / tails.sum(-1, keepdim=True)
    return _laplace_cdf((scores - b) / temperature)


def _laplace_cdf(z: Tensor) -> Tensor:
    return torch.where(z > 0, 1 - torch.exp(-z.clamp(min=0)) / 2, torch.exp(z.clamp(max=0)) / 2)


def _solve(z: Tensor, k: Tensor) -> Tensor:
    """(…, E) and (…, 1) → (…, 1), b with Σ_e F(z_e − b) = k.

    With z sorted, A_i = Σ_{j ≥ i} e^{z_i − z_j} and B_i = Σ_{j ≤ i} e^{z_j − z_i}, the sum of F(b − z_j) at b = z_i is
    (2i + 1 + A_i − B_i)/2. It rises with i, so b lies between the neighbours m and n around E − k. There the sum is
    i + A_n e^{b − z_n}/2 − B_m e^{z_m − b}/2 with i entries below: a quadratic equation, solved without cancellation.
    """
    z = z.sort(dim=-1).values
    count = z.shape[-1]
    below = (z.logcumsumexp(-1) - z).exp()
    above = ((-z).flip(-1).logcumsumexp(-1).flip(-1) + z).exp()
    at_scores = above - below + torch.arange(1, 2 * count, 2, device=z.device)
    wanted = count - k
    i = (at_scores < 2 * wanted).sum(-1, keepdim=True)
    m, n = (i - 1).clamp(min=0), i.clamp(max=count - 1)
    low, high = z.gather(-1, m), z.gather(-1, n)
    log_a = torch.where(i < count, above.gather(-1, n).log(), -torch.inf)
    log_c = torch.where(i > 0, below.gather(-1, m).log(), -torch.inf)
    rest = wanted - i
    middle = (log_a + log_c + low - high) / 2  # for rest = 0, where the exponential may underflow
    log_root = torch.where(rest == 0, middle, (rest.abs() + (rest.square() + (2 * middle).exp()).sqrt()).log())
    return torch.where(rest > 0, high + log_root - log_a, low - log_root + log_c)
