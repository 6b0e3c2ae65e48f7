"""Loads over training: how many assignments each expert or block of each layer got between two lines of metrics.

From ``loads.jsonl``, which training writes for methods whose tokens choose. All ratios are computed again from its
counts, for every layer by itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from intbmoe.statistics import LoadStatistics, load_statistics_of

RATIOS = ("utilisation", "worst_case", "entropy")


@dataclass(frozen=True)
class LayerHistory:
    """One layer; every list has an entry for each of the steps."""

    layer: str
    steps: list[int]  # the last steps of the windows
    tokens: list[int]  # valid tokens of each window
    counts: list[list[int | None]]
    """Assignments of each expert or block; None where a growing pool did not have it open."""
    utilisation: list[float | None]
    worst_case: list[float | None]
    entropy: list[float | None]  # ratios as ``LoadStatistics`` has them; None in a window without assignments
    dead: list[int]  # how many of those there were got no token
    active: list[float]  # assignments for each token
    dropped: list[float]
    """Share of the wanted assignments that found their expert full; 0 for a method without capacity."""
    untaken: list[float] | None
    """Share of the tokens that no expert took; None for a method that does not count them in training."""


@dataclass(frozen=True)
class LoadHistory:
    unit: str  # what tokens are sent to: "block" or "expert"
    layers: list[LayerHistory]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"step": step, "layer": found.layer, self.unit: index, "assignments": count, "tokens": tokens}
            for found in self.layers
            for step, tokens, counts in zip(found.steps, found.tokens, found.counts, strict=True)
            for index, count in enumerate(counts)
            if count is not None
        ]


def load_history(lines: Sequence[Mapping[str, Any]], unit: str) -> LoadHistory:
    names = list(dict.fromkeys(name for line in lines for name in line["layers"]))
    return LoadHistory(unit, [_layer_history(name, lines) for name in names])


def _layer_history(name: str, lines: Sequence[Mapping[str, Any]]) -> LayerHistory:
    found = [(line["step"], line["layers"][name]) for line in lines if name in line["layers"]]
    windows = [window for _, window in found]
    statistics = [_statistics(window) for window in windows]
    ratios = {ratio: [_number(getattr(load, ratio)) for load in statistics] for ratio in RATIOS}
    counted = any("untaken" in window for window in windows)
    return LayerHistory(
        layer=name,
        steps=[step for step, _ in found],
        tokens=[window["tokens"] for window in windows],
        counts=[window["counts"] for window in windows],
        dead=[len(load.dead) for load in statistics],
        active=[sum(load.counts) / max(1, load.tokens) for load in statistics],
        dropped=[window.get("dropped", 0.0) for window in windows],
        untaken=[window.get("untaken", 0.0) for window in windows] if counted else None,
        **ratios,
    )


def _statistics(window: Mapping[str, Any]) -> LoadStatistics:
    opened = torch.tensor([count is not None for count in window["counts"]])
    counts = torch.tensor([count or 0 for count in window["counts"]], dtype=torch.int64)
    return load_statistics_of(counts, window["tokens"], opened=opened)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
