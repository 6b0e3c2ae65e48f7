"""How evenly a layer's experts or blocks are used."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LoadStatistics:
    """Load over some window of tokens. One assignment is one token sent to one expert or block."""

    counts: tuple[int, ...]
    """Assignments of each expert or block."""
    tokens: int
    """Valid tokens; padding is never among them."""
    utilisation: float
    """Share of the experts that got at least one assignment."""
    worst_case: float
    """Largest load over mean load: 1 is perfect balance, the number of experts is collapse."""
    entropy: float
    """Entropy of the loads over its maximum: 1 is perfect balance, 0 is collapse."""
    dead: tuple[int, ...]
    """Experts without a single assignment."""
    dropped: float = 0.0
    """Share of the wanted assignments that found their expert full."""
    untaken: float | None = None
    """Share of the tokens that no expert took; None if the method does not count them, or assigned nothing."""


def load_statistics_of(
    counts: Tensor, tokens: int, dropped: int = 0, opened: Tensor | None = None, untaken: int | None = None
) -> LoadStatistics:
    """Statistics of (E,) assignment counts and ``dropped`` ones; without any assignment every ratio is NaN.

    ``opened`` (E,) says which experts a pool has open: others without load are neither idle nor dead, but not there.
    """
    loads = [int(count) for count in counts.tolist()]
    present = [index for index in range(len(loads)) if opened is None or bool(opened[index]) or loads[index]]
    total = sum(loads)
    dead = tuple(index for index in present if loads[index] == 0)
    if total == 0:
        return LoadStatistics(tuple(loads), tokens, math.nan, math.nan, math.nan, dead)
    shares = [loads[index] / total for index in present]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return LoadStatistics(
        counts=tuple(loads),
        tokens=tokens,
        utilisation=1 - len(dead) / len(present),
        worst_case=max(shares) * len(present),
        entropy=entropy / math.log(len(present)) if len(present) > 1 else 1.0,
        dead=dead,
        dropped=dropped / (total + dropped),
        untaken=None if untaken is None else untaken / tokens,
    )
