"""Which tokens go where: shares of token–block assignments, minus uniform, for each kind of token.

Every choice of a top-k selection is one assignment. A block's share of the assignments of one kind of token, minus one
over the number of blocks, is 0 if the router has no preference. It is at most 1/k − 1/K, because the k choices of a
token are k different blocks. The task defines the kinds of tokens (``Task.views``).

Single examples are followed layer by layer; the task chooses them and names their tokens (``Task.shown``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from intbmoe.analysis.loads import choosing_layers, present_choices, unit_of
from intbmoe.analysis.sample import Sample
from intbmoe.routing import RecordedRouting
from intbmoe.tasks.looking import Shown, View


@dataclass(frozen=True)
class LayerShares:
    layer: str
    choices: list[int]  # numbers of the blocks or experts: the columns
    counts: list[list[int]]  # (labels, columns) assignments
    minus_uniform: list[list[float] | None]  # share minus uniform; None for a label without assignments


@dataclass(frozen=True)
class SharesOfView:
    name: str
    chosen: bool  # whether the user chose these labels: then a picture shows all of them
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


class Chosen(NamedTuple):
    """The views, layers and examples whose routing is analysed."""

    views: list[View]
    layers: list[str]
    sample: Sample
    view: str | None = None  # the view whose labels were chosen


def choose(model: nn.Module, sample: Sample, classes: Sequence[str] = (), layers: Sequence[str] = ()) -> Chosen:
    """Choose classes and layers by their names or numbers; all if none is given."""
    task, names = sample.task, list(choosing_layers(model))
    if not names and (classes or layers):
        raise ValueError("there are no classes or layers to choose: the tokens of this model do not choose experts")
    views = task.views() if names else []
    found = _choose_layers(names, layers) if layers else names
    if not classes:
        return Chosen(views, found, sample)
    view = next((view for view in views if view.words), None)
    if view is None:
        told = f"; its tokens are grouped by {', '.join(view.name for view in views)}" if views else ""
        raise ValueError(f"classes={list(classes)} cannot be chosen: the task {task.name!r} has none{told}")
    places = view.places_of(classes)
    if view.of_examples is not None:
        among = np.flatnonzero(np.isin(view.of_examples(sample.source), places))
        sample = Sample(task, sample.split, sample.wanted, sample.ranks, sample.batch_size, among)
    kept = [view.narrowed(places) if one is view else one for one in views]
    return Chosen(kept, found, sample, view.name)


def _choose_layers(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Find layers by their full names, or by their names in pictures: the last number or the last word."""
    short = {name: ([part for part in name.split(".") if part.isdigit()] or name.split("."))[-1] for name in names}
    found = [name for word in wanted for name in names if word in (name, short[name])]
    unknown = [word for word in wanted if word not in short and word not in short.values()]
    if unknown:
        known = ", ".join(f"{short[name]} ({name})" for name in names)
        raise ValueError(f"no layer is called {unknown[0]!r}: the layers whose tokens choose are {known}")
    return list(dict.fromkeys(found))


def routing_shares(model: nn.Module, chosen: Chosen) -> RoutingShares:
    """Count where the sample's tokens go, in one pass for all views."""
    views, sample = chosen.views, chosen.sample
    layers = {name: layer for name, layer in choosing_layers(model).items() if name in chosen.layers}
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
            view.name == chosen.view,
            list(view.labels),
            [_shares(name, layers[name], counts[view.name, name]) for name in chosen.layers],
        )
        for view in views
    ]
    return RoutingShares(unit_of(model), sample.split, sample.examples, found)


def count_pairs(labels: Tensor, ids: Tensor, shape: tuple[int, int]) -> Tensor:
    """(N,) labels and (N, k) choices → how often each label (row) chose each block (column), ignoring −1."""
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


@dataclass(frozen=True)
class LayerChoices:
    """Where one layer sent an example's tokens, with one entry per token."""

    layer: str
    ids: list[list[int]]  # blocks or experts by descending weight; empty for a token that was left out
    weights: list[list[float]]


@dataclass(frozen=True)
class ShownExample:
    index: int  # its index in the split
    title: str
    kinds: list[str]  # patch, token, item; profile, scenario, intention or feedback
    texts: list[str]
    """A description of each token: a patch's row and column, a token's text, an intention's category, …"""
    image: str | None  # for images, a PNG of the pixels in base64
    layers: list[LayerChoices]


@dataclass(frozen=True)
class ExampleRouting:
    unit: str  # what tokens are sent to: "block" or "expert"
    split: str
    form: str  # image, text, sessions or items: how they are drawn
    choices: int  # the number of blocks or experts, in the layer with most
    examples: list[ShownExample]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"example": shown.index, "token": place, "kind": shown.kinds[place], "text": shown.texts[place]}
            | {"layer": found.layer, "rank": rank, self.unit: choice, "weight": found.weights[place][rank]}
            for shown in self.examples
            for found in shown.layers
            for place, ids in enumerate(found.ids)
            for rank, choice in enumerate(ids)
        ]


def example_routing(model: nn.Module, sample: Sample, shown: Shown) -> ExampleRouting:
    """Run the model on some examples of the sample's split and record where their tokens go."""
    layers = choosing_layers(model)
    batch, log = sample.routed_examples(model, shown.indices)
    found = []
    for row, index in enumerate(shown.indices):
        content = shown.describe(batch, row, index)
        tokens = {place: token for place, token in enumerate(content.tokens) if token is not None}
        kinds, texts = [token.kind for token in tokens.values()], [token.text for token in tokens.values()]
        choices = [_choices(name, log[name], row, tokens) for name in layers]
        found.append(ShownExample(index, content.title, kinds, texts, content.image, choices))
    most = max(layer.choices for layer in layers.values())
    return ExampleRouting(unit_of(model), sample.split, shown.form, most, found)


def _choices(name: str, record: RecordedRouting, row: int, places: Iterable[int]) -> LayerChoices:
    """The choices of the tokens at ``places`` in one example of the batch."""
    start, end = row * record.shape[-1], (row + 1) * record.shape[-1]
    ids, weights = record.ids[start:end].tolist(), record.weights[start:end].double().tolist()
    pairs = []
    for place in places:
        chosen = [pair for pair in zip(ids[place], weights[place], strict=True) if pair[0] >= 0]
        pairs.append(sorted(chosen, key=lambda pair: (-pair[1], pair[0])))
    return LayerChoices(name, [[i for i, _ in of] for of in pairs], [[w for _, w in of] for of in pairs])
