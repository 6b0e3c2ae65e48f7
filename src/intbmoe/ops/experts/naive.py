"""The specification: each token's chosen experts, one after another."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """One expert: (S, d) tokens, (d, h), (h,), (h, d) and (d,) parameters → (S, d)."""
    return F.gelu(x @ up + up_bias) @ down + down_bias


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert: (S, d) tokens, (d, h), (d, h) and (h, d) parameters → (S, d)."""
    return (F.silu(x @ gate) * (x @ up)) @ down


NETWORKS = {"gelu": gelu, "swiglu": swiglu}


def run_experts(
    network: str, x: Tensor, ids: Tensor, weights: Tensor, parameters: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """(N, d) tokens, (N, k) their experts (−1: none) and weights → (N, d) sums, and loads (E,).

    ``parameters`` are those of the network, each with a leading dimension of E.
    """
    y = torch.zeros_like(x)
    load = torch.zeros(len(parameters[0]), dtype=torch.int64)
    for token, choice in (ids >= 0).nonzero().tolist():
        expert = ids[token, choice]
        own = NETWORKS[network](x[token : token + 1], *[parameter[expert] for parameter in parameters])
        y[token] += weights[token, choice] * own[0]
        load[expert] += 1
    return y, load
