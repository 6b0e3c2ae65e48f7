"""When a server's budget is broken, and the highest rate at which it is not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_clients import Step

GROWTH = 1.6
"""From one rate to the next, where no more are given."""
LOWEST = 1.0
"""Requests a second below which a server holds nothing."""


@dataclass(frozen=True)
class Budget:
    """What every step is held against."""

    p99_ms: float
    mean_ms: float | None = None

    def breach(self, step: Step) -> str | None:
        """Why a step breaks the budget; None where it holds it."""
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
    """The highest rate known to hold: rising along ``rates`` and beyond until one breaks, then between the two.

    ``holds(rate)`` measures; None says that there is no time for it, and ends the search. It ends too at the rate
    ``most``, or when what holds and what breaks are within a factor of 1 + ``resolution``.
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
    while low is None:  # not even the first
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
