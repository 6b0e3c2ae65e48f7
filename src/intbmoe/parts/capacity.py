"""Capacity: how many tokens an expert takes from one sequence in methods that may drop the others.

Capacity is counted per sequence, so that a result does not depend on the rest of the batch. Padding needs no place.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from intbmoe.parts.dispatch import exact_ratio
from intbmoe.parts.experts import ExpertsConfig, RoutedLayer
from intbmoe.settings import Positive


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(ExpertsConfig):
    """Options of a token-choice method that can drop tokens."""

    capacity_factor: Positive | None = None
    """Places per expert and sequence in training, relative to a fair share; None drops nothing."""
    eval_capacity_factor: Positive | None = None
    """The same in evaluation."""

    @property
    def has_capacity(self) -> bool:
        return self.capacity_factor is not None or self.eval_capacity_factor is not None

    def noncausal_reason(self) -> str | None:
        if not self.has_capacity:
            return None
        return (
            "an expert's capacity depends on the number of tokens in the sequence, later ones too (None drops nothing)"
        )


class CapacityLayer(RoutedLayer):
    """Holds the capacity factors for training and evaluation as exact fractions, which compiled code cannot make."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        factors = {True: self.config.capacity_factor, False: self.config.eval_capacity_factor}
        self._ratios = {
            training: None if factor is None else exact_ratio(factor) for training, factor in factors.items()
        }

    def places(self, x: Tensor, mask: Tensor | None, least: int) -> int | Tensor | None:
        """Places per expert and sequence; (B, 1) with a mask, as padding needs no place; None if nothing is dropped."""
        ratio = self._ratios[self.training]
        if ratio is None:
            return None
        numerator, denominator = ratio
        valid = x.shape[1] if mask is None else mask.sum(1, keepdim=True)
        places = valid * numerator // (self.config.experts * denominator)
        return max(least, places) if mask is None else places.clamp(min=least)
