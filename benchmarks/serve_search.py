"""Decides when a server exceeds its budget, and finds the highest rate at which it does not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_clients import Step

GROWTH = 1.6
"""Factor from one rate to the next, beyond the given ones."""
LOWEST = 1.0
"""Lowest rate that is tried, in requests per second."""


@dataclass(frozen=True)
class Budget:
    """The limits for every step."""

    p99_ms: float
    mean_ms: float | None = None

    def breach(self, step: Step) -> str | None:
        """Returns why a step exceeds the budget, or None if it does not."""
        if step.errors:
            return f"{sum(step.errors.values())} of {step.due}: {', '.join(step.errors)}"
        if not step.p99_ms <= self.p99_ms:
            return f"P99 {step.p99_ms:.1f} ms"
        if self.mean_ms is not None and not step.mean_ms <= self.mean_ms:
            return f"mean {step.mean_ms:.1f} ms"
        return None


def find_highest(
    holds: Callable[[float], bool | None], rates: Sequence[float], *, most: float, resolution: float
) -> float | None:
    """Finds the highest good rate: rises along ``rates`` and beyond until one fails, then searches between the two.

    ``holds(rate)`` measures a rate; it returns None if there is no time left, which ends the search. The search also
    ends at the rate ``most``, or when the good and the bad rate are within a factor of 1 + ``resolution``.
    """
    low: float | None = None
    ladder = [rate for rate in rates if rate <= most]
    while True:
        rate = ladder.pop(0) if ladder else min(most, low * GROWTH)
        answer = holds(rate)
        if not answer:
            break
        low = rate
        if rate >= most:
            return low
    if answer is None:
        return low
    high = rate
    while low is None:  # even the first rate failed
        rate = high / GROWTH**2
        if rate < LOWEST:
            return None
        answer = holds(rate)
        if answer is None:
            return None
        low, high = (rate, high) if answer else (None, rate)
    while high / low > 1 + resolution:
        rate = math.sqrt(low * high)
        answer = holds(rate)
        if answer is None:
            break
        low, high = (rate, high) if answer else (low, rate)
    return low
