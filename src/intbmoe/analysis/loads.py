"""Loads and losses: how training went, and how evenly the model uses its experts or blocks.

The history of training comes from two files. ``metrics.jsonl`` has loads as means over the layers that choose.
``loads.jsonl``, which training writes for methods whose tokens choose, has the assignments of each expert or block of
each layer between two lines of metrics; all ratios are computed from them again. For the trained model, the loads of
single experts, the number of experts per token and the assignments left out are counted on examples of a split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from intbmoe.analysis.sample import Sample
from intbmoe.layer import MoELayer, moe_layers
from intbmoe.methods.intbmoe import BlockLayer
from intbmoe.routing import RecordedRouting
from intbmoe.statistics import LoadStatistics, load_statistics_of

PLACE = ("step", "epoch", "split")  # the first fields of a line of metrics; the others are metrics
RATIOS = ("utilisation", "worst_case", "entropy")


@dataclass(frozen=True)
class Curve:
    split: str
    name: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class TrainingCurves:
    metric: str
    higher_is_better: bool
    curves: list[Curve]
    lines: list[dict[str, Any]]  # the lines themselves, for CSV

    def rows(self) -> list[dict[str, Any]]:
        """A row for each line of metrics, all with the same columns; None if a line has no such value."""
        columns = dict.fromkeys(name for line in self.lines for name in line)
        return [{name: line.get(name) for name in columns} for line in self.lines]


def training_curves(lines: Sequence[dict[str, Any]], metric: str, higher_is_better: bool) -> TrainingCurves:
    found: dict[tuple[str, str], Curve] = {}
    for line in lines:
        for name in (name for name in line if name not in PLACE):
            key = (line["split"], name)
            curve = found.setdefault(key, Curve(*key, [], []))
            curve.steps.append(line["step"])
            curve.values.append(line[name])
    return TrainingCurves(metric, higher_is_better, list(found.values()), list(lines))


@dataclass(frozen=True)
class LayerHistory:
    """One layer; every list has one entry per window."""

    layer: str
    steps: list[int]  # the last steps of the windows
    tokens: list[int]  # valid tokens of each window
    counts: list[list[int | None]]
    """Assignments of each expert or block; None if a growing pool did not have it open."""
    utilisation: list[float | None]
    worst_case: list[float | None]
    entropy: list[float | None]  # ratios as ``LoadStatistics`` has them; None in a window without assignments
    dead: list[int]  # the number of open experts or blocks without a token
    active: list[float]  # assignments per token
    dropped: list[float]
    """Fraction of the wanted assignments that were dropped at a full expert; 0 for a method without capacity."""
    untaken: list[float] | None
    """Fraction of the tokens that no expert took; None for a method that does not count them in training."""


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


@dataclass(frozen=True)
class LayerLoad:
    layer: str
    counts: list[int]  # assignments of each expert or block
    present: list[int]  # the open ones: a growing pool has others in reserve
    tokens: int  # valid tokens; padding is not counted
    active: float  # mean number of experts or blocks per token
    utilisation: float | None
    worst_case: float | None
    entropy: float | None
    dead: list[int]
    dropped: float | None
    """Fraction of the wanted assignments that were dropped at a full expert; None for a method that never drops any."""
    untaken: float  # fraction of the tokens without any expert or block
    tokens_by_choices: list[int]  # how many tokens have 0, 1, 2, … experts or blocks


@dataclass(frozen=True)
class EvaluatedLoad:
    unit: str  # what tokens are sent to: "block" or "expert"
    split: str
    examples: int
    layers: list[LayerLoad]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"layer": load.layer, self.unit: index, "assignments": load.counts[index], "tokens": load.tokens}
            for load in self.layers
            for index in load.present
        ]


def choosing_layers(model: nn.Module) -> dict[str, MoELayer]:
    return {name: layer for name, layer in moe_layers(model) if layer.choices is not None}


def unit_of(model: nn.Module) -> str:
    """What the model's tokens are sent to: "block" or "expert"."""
    blocks = any(isinstance(layer, BlockLayer) for layer in choosing_layers(model).values())
    return "block" if blocks else "expert"


def present_choices(layer: MoELayer, counts: Sequence[int]) -> list[int]:
    """The experts or blocks of a layer that are open or got a token."""
    opened = layer.open_choices
    return [index for index, count in enumerate(counts) if opened is None or bool(opened[index]) or count]


def evaluated_load(model: nn.Module, sample: Sample) -> EvaluatedLoad:
    layers = choosing_layers(model)
    counted = {name: _Counted(layer.choices) for name, layer in layers.items()}
    for _, log in sample.routed(model):
        for name in layers:
            counted[name].add(log[name])
    found = [_layer_load(name, layer, counted[name]) for name, layer in layers.items()]
    return EvaluatedLoad(unit_of(model), sample.split, sample.examples, found)


class _Counted:
    """The counts of one layer, summed over batches."""

    def __init__(self, choices: int) -> None:
        self.counts = torch.zeros(choices, dtype=torch.int64)
        self.by_choices = torch.zeros(choices + 1, dtype=torch.int64)
        self.tokens = 0
        self.dropped: int | None = None

    def add(self, record: RecordedRouting) -> None:
        statistics = record.load_statistics()
        self.counts += torch.tensor(statistics.counts)
        self.tokens += statistics.tokens
        having = (record.ids >= 0).sum(1).cpu()
        self.by_choices += torch.bincount(having, minlength=len(self.by_choices))
        if record.dropped is not None:
            self.dropped = (self.dropped or 0) + record.dropped

    def tokens_by_choices(self) -> list[int]:
        """The number of valid tokens with 0, 1, 2, … choices; padding, which also has none, is not counted."""
        counts = self.by_choices.tolist()
        counts[0] = self.tokens - sum(counts[1:])
        most = max((number for number, count in enumerate(counts) if count), default=0)
        return counts[: most + 1]


def _layer_load(name: str, layer: MoELayer, counted: _Counted) -> LayerLoad:
    tokens, by_choices = counted.tokens, counted.tokens_by_choices()
    statistics = load_statistics_of(counted.counts, tokens, counted.dropped or 0, layer.open_choices)
    return LayerLoad(
        layer=name,
        counts=list(statistics.counts),
        present=present_choices(layer, statistics.counts),
        tokens=tokens,
        active=sum(statistics.counts) / max(1, tokens),
        dead=list(statistics.dead),
        dropped=None if counted.dropped is None else statistics.dropped,
        untaken=by_choices[0] / max(1, tokens),
        tokens_by_choices=by_choices,
        **{ratio: _number(getattr(statistics, ratio)) for ratio in RATIOS},
    )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
