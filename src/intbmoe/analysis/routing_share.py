"""Where which tokens go: shares of token–block assignments, minus uniform, for each kind of token.

Every choice of a top-k selection is one assignment. The share of a block among the assignments of a kind of token,
minus one over the number of blocks, is 0 where the router does not care. It is at most 1/k − 1/K: k choices of a
token are k different blocks. How tokens are told apart is the task's to say (``Task.views``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.analysis.loads import choosing_layers, present_choices, unit_of
from intbmoe.analysis.sample import Sample
from intbmoe.tasks.looking import View


@dataclass(frozen=True)
class LayerShares:
    layer: str
    choices: list[int]  # numbers of the blocks or experts: the columns
    counts: list[list[int]]  # (labels, columns) assignments
    minus_uniform: list[list[float] | None]  # share minus uniform; None for a label without assignment


@dataclass(frozen=True)
class SharesOfView:
    name: str
    labels: list[str]
    layers: list[LayerShares]


@dataclass(frozen=True)
class RoutingShares:
    unit: str  # what tokens are sent to: "block" or "expert"
    split: str
    examples: int
    views: list[SharesOfView]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"view": view.name, "layer": found.layer, "label": label, self.unit: choice}
            | {"assignments": found.counts[row][column], "minus_uniform": found.minus_uniform[row][column]}
            for view in self.views
            for found in view.layers
            for row, label in enumerate(view.labels)
            if found.minus_uniform[row] is not None
            for column, choice in enumerate(found.choices)
        ]


def routing_shares(model: nn.Module, sample: Sample, views: Sequence[View]) -> RoutingShares:
    """Count where the sample's tokens go, in one pass for all views."""
    layers = choosing_layers(model)
    counts = {
        (view.name, name): torch.zeros(len(view.labels), layer.choices, dtype=torch.int64)
        for view in views
        for name, layer in layers.items()
    }
    for batch, log in sample.routed(model):
        for view in views:
            labels = view.find(batch)
            for name, layer in layers.items():
                spread = labels.expand(log[name].shape).reshape(-1)
                counted = count_pairs(spread, log[name].ids, (len(view.labels), layer.choices))
                counts[view.name, name] += counted.cpu()
    found = [
        SharesOfView(
            view.name,
            list(view.labels),
            [_shares(name, layer, counts[view.name, name]) for name, layer in layers.items()],
        )
        for view in views
    ]
    return RoutingShares(unit_of(model), sample.split, sample.examples, found)


def count_pairs(labels: Tensor, ids: Tensor, shape: tuple[int, int]) -> Tensor:
    """(N,) labels and (N, k) choices → how often each label (row) chose each block (column); −1 is not counted."""
    labels = labels.unsqueeze(1).expand_as(ids)
    counted = (labels >= 0) & (ids >= 0)
    pairs = labels[counted] * shape[1] + ids[counted]
    return torch.bincount(pairs, minlength=shape[0] * shape[1]).view(shape)


def _shares(name: str, layer: Any, counts: Tensor) -> LayerShares:
    present = present_choices(layer, counts.sum(0).tolist())
    kept = counts[:, present]
    totals = kept.sum(1)
    shares = kept.double() / totals.clamp(min=1).unsqueeze(1) - 1 / len(present)
    rows = [row if total else None for row, total in zip(shares.tolist(), totals.tolist(), strict=True)]
    return LayerShares(name, present, kept.tolist(), rows)
