"""Hit rate and NDCG over a full ranking, for all targets and for those that are new to their user.

rank     1 + the other items that score as high as the target or higher: ties count against
HR@k     share of targets with rank ≤ k
NDCG@k   mean of 1/log₂(1 + rank) over all targets, 0 where rank > k
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from intbmoe.checks import require

HITS = (1, 5, 10)
NDCG = 10
NAMES = (*(f"HR@{k}" for k in HITS), f"NDCG@{NDCG}")
NEW = " new"


def rank_of(scores: Tensor, target: Tensor) -> Tensor:
    """(B, V) scores, (B,) targets → (B,) ranks from 1. What is not a number is never ranked below anything."""
    below = scores < scores.gather(1, target.unsqueeze(1))
    return scores.shape[1] - below.sum(1)


def ranking_gains(ranks: Tensor, new: Tensor) -> dict[str, Tensor]:
    """(B,) what each target adds to each metric's sum, to ``count`` and to ``count new``."""
    gains = {f"HR@{k}": (ranks <= k).double() for k in HITS}
    gains[f"NDCG@{NDCG}"] = torch.where(ranks <= NDCG, 1 / torch.log2(1 + ranks.double()), 0)
    gains["count"] = torch.ones_like(ranks, dtype=torch.float64)
    return {f"{name}{part}": gain * of for part, of in (("", 1), (NEW, new)) for name, gain in gains.items()}


def ranking_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics; 0 for new targets where there is none."""
    count, new = float(sums["count"]), float(sums["count" + NEW])
    require(count > 0, "count", count, "positive: no target was evaluated")
    metrics = {name: float(sums[name]) / count for name in NAMES}
    metrics |= {name + NEW: float(sums[name + NEW]) / max(new, 1) for name in NAMES}
    return {**metrics, "share new": new / count}
