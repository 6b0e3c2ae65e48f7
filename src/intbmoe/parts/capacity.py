"""Capacity: how many tokens an expert takes from one sequence, where a method may drop the others.

The group is the sequence, so that a result does not depend on the batch around it, and padding needs no place.
"""

from dataclasses import KW_ONLY, dataclass

from intbmoe.parts.dispatch import exact_ratio
from intbmoe.parts.experts import ExpertsConfig
from intbmoe.settings import Positive


@dataclass(frozen=True)
class CapacityConfig(ExpertsConfig):
    """Fields of a token-choice method that can drop."""

    _: KW_ONLY
    capacity_factor: Positive | None = None
    """Places an expert has for a sequence, relative to its fair share, in training; None drops nothing."""
    eval_capacity_factor: Positive | None = None
    """The same in evaluation."""

    @property
    def has_capacity(self) -> bool:
        """Whether anything can be dropped, in training or in evaluation."""
        return self.capacity_factor is not None or self.eval_capacity_factor is not None

    def noncausal_reason(self) -> str | None:
        if not self.has_capacity:
            return None
        return (
            "an expert's capacity grows with the number of tokens in the sequence, later ones too (None drops nothing)"
        )

    def capacity_ratios(self) -> dict[bool, tuple[int, int] | None]:
        """The factors as exact fractions, by whether the layer is training. Not for compiled code."""
        factors = {True: self.capacity_factor, False: self.eval_capacity_factor}
        return {training: None if factor is None else exact_ratio(factor) for training, factor in factors.items()}
