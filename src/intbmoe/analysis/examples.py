"""Single examples: to which blocks or experts each of their patches or tokens went, layer by layer.

The task says which examples, always the same ones of a split, and what their tokens are called (``Task.shown``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from intbmoe.analysis.loads import choosing_layers, unit_of
from intbmoe.analysis.sample import Sample
from intbmoe.routing import RecordedRouting
from intbmoe.tasks.looking import Content, Shown


@dataclass(frozen=True)
class LayerChoices:
    """Where one layer sent an example's tokens; an entry a token."""

    layer: str
    ids: list[list[int]]  # blocks or experts, the heaviest first; none for a token that was left out
    weights: list[list[float]]


@dataclass(frozen=True)
class ShownExample:
    index: int  # its place in the split
    title: str
    kinds: list[str]  # patch, token, item; profile, scenario, intention or feedback
    texts: list[str]
    """What each token says: a patch its row and column, a token its text, an intention the category, …"""
    image: str | None  # of images, a PNG of its pixels in base64
    layers: list[LayerChoices]


@dataclass(frozen=True)
class ExampleRouting:
    unit: str  # what tokens are sent to: "block" or "expert"
    split: str
    form: str  # image, text, sessions or items: how they are drawn
    choices: int  # how many blocks or experts there are, in the layer with most
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
    """Run the model on some examples of the sample's split and note where their tokens go."""
    layers = choosing_layers(model)
    batch, log = sample.routed_examples(model, shown.indices)
    found = [
        _show(index, shown.describe(batch, row, index), {name: _of_example(log[name], row) for name in layers})
        for row, index in enumerate(shown.indices)
    ]
    most = max(layer.choices for layer in layers.values())
    return ExampleRouting(unit_of(model), sample.split, shown.form, most, found)


def _of_example(record: RecordedRouting, row: int) -> tuple[Tensor, Tensor]:
    """(T, k) ids and weights of one example of the batch."""
    tokens = record.shape[-1]
    part = slice(row * tokens, (row + 1) * tokens)
    return record.ids[part].cpu(), record.weights[part].double().cpu()


def _show(index: int, content: Content, choices: Mapping[str, tuple[Tensor, Tensor]]) -> ShownExample:
    places = [place for place, token in enumerate(content.tokens) if token is not None]
    layers = []
    for name, (ids, weights) in choices.items():
        pairs = [_heaviest_first(ids[place].tolist(), weights[place].tolist()) for place in places]
        layers.append(LayerChoices(name, [[i for i, _ in of] for of in pairs], [[w for _, w in of] for of in pairs]))
    tokens = [content.tokens[place] for place in places]
    kinds, texts = [token.kind for token in tokens], [token.text for token in tokens]
    return ShownExample(index, content.title, kinds, texts, content.image, layers)


def _heaviest_first(ids: Sequence[int], weights: Sequence[float]) -> list[tuple[int, float]]:
    chosen = [(choice, weight) for choice, weight in zip(ids, weights, strict=True) if choice >= 0]
    return sorted(chosen, key=lambda pair: (-pair[1], pair[0]))
