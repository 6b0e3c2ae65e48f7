"""Capacity: how many tokens an expert takes from one sequence, where a method may drop the others.

The group is the sequence, so that a result does not depend on the batch around it, and padding needs no place.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from intbmoe.parts.dispatch import exact_ratio
from intbmoe.parts.experts import ExpertsConfig, RoutedLayer
from intbmoe.settings import Positive


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(ExpertsConfig):
    """Fields of a token-choice method that can drop."""

    capacity_factor: Positive | None = None
    """Places an expert has for a sequence, relative to its fair share, in training; None drops nothing."""
    eval_capacity_factor: Positive | None = None
    """The same in evaluation."""

    @property
    def has_capacity(self) -> bool:
        return self.capacity_factor is not None or self.eval_capacity_factor is not None

    def noncausal_reason(self) -> str | None:
        if not self.has_capacity:
            return None
        return (
            "an expert's capacity grows with the number of tokens in the sequence, later ones too (None drops nothing)"
        )


class CapacityLayer(RoutedLayer):
    """Keeps the factors as exact fractions, by whether the layer is training: compiled code could not make them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        factors = {True: self.config.capacity_factor, False: self.config.eval_capacity_factor}
        self._ratios = {
            training: None if factor is None else exact_ratio(factor) for training, factor in factors.items()
        }

    def places(self, x: Tensor, mask: Tensor | None, least: int) -> int | Tensor | None:
        """Of an expert for a sequence: (B, 1) with a mask, since padding needs no place; None if nothing is dropped."""
        ratio = self._ratios[self.training]
        if ratio is None:
            return None
        numerator, denominator = ratio
        valid = x.shape[1] if mask is None else mask.sum(1, keepdim=True)
        places = valid * numerator // (self.config.experts * denominator)
        return max(least, places) if mask is None else places.clamp(min=least)
