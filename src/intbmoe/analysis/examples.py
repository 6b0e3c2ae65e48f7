"""Single examples: to which blocks or experts each of their patches or tokens went, layer by layer.

How the examples of a task are chosen and what their tokens are called is said here, one class a task. The same run and
split always give the same examples: of images one a class, classes evenly spread; of all else evenly spread ones.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from intbmoe.analysis.loads import choosing_layers, unit_of
from intbmoe.analysis.routing_share import (
    CATEGORY,
    HOUR,
    NO_LABEL,
    TRAVEL_TYPES,
    category_names,
    token_texts,
    travel_types,
)
from intbmoe.analysis.sample import Sample
from intbmoe.models.sequence import PADDING
from intbmoe.models.travel import PROFILE_TOKENS, SCENARIO, SESSION_TOKENS
from intbmoe.routing import RecordedRouting
from intbmoe.tasks.base import Batch

MOST_IMAGES, MOST_OTHERS = 6, 3
"""Examples shown."""
MOST_TOKENS = 256
"""Of a text, from its beginning."""
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


class Token(NamedTuple):
    """What a token is; None in its place is padding."""

    kind: str
    text: str


@dataclass(frozen=True)
class LayerChoices:
    """Where one layer sent an example's tokens; an entry a token."""

    layer: str
    ids: list[list[int]]
    """Blocks or experts, the heaviest first; none for a token that was left out."""
    weights: list[list[float]]


@dataclass(frozen=True)
class ShownExample:
    """One example."""

    index: int
    """Its place in the split."""
    title: str
    kinds: list[str]
    """patch, token, item; profile, scenario, intention or feedback."""
    texts: list[str]
    """What each token says: a patch its row and column, a token its text, an intention the category, …"""
    image: str | None
    """Of images, a PNG of its pixels in base64."""
    layers: list[LayerChoices]


@dataclass(frozen=True)
class ExampleRouting:
    """All examples shown."""

    unit: str
    """What tokens are sent to: "block" or "expert"."""
    split: str
    form: str
    """image, text, sessions or items: how they are drawn."""
    choices: int
    """How many blocks or experts there are, in the layer with most."""
    examples: list[ShownExample]

    def rows(self) -> list[dict[str, Any]]:
        """One for each choice of each token, for CSV."""
        return [
            {"example": shown.index, "token": place, "kind": shown.kinds[place], "text": shown.texts[place]}
            | {"layer": found.layer, "rank": rank, self.unit: choice, "weight": found.weights[place][rank]}
            for shown in self.examples
            for found in shown.layers
            for place, ids in enumerate(found.ids)
            for rank, choice in enumerate(ids)
        ]


class Content(NamedTuple):
    """What an example of a batch is, without its routing."""

    title: str
    tokens: list[Token | None]
    """In the order of the model's tokens."""
    image: str | None = None


Describe = Callable[[Batch, int, int], Content]
"""(batch, row, index in the split) → what the example is."""


class Shown(NamedTuple):
    """How a task's examples are shown."""

    form: str
    choose: Callable[[Sample], list[int]]
    describe: Callable[[Sample], Describe]


def spread(sample: Sample) -> list[int]:
    """Some examples, evenly spread over the split."""
    number = min(MOST_OTHERS, sample.total)
    return [(2 * place + 1) * sample.total // (2 * number) for place in range(number)]


def one_a_class(sample: Sample) -> list[int]:
    """The first image of some classes, which are evenly spread over all that there are."""
    classes, first = np.unique(sample.source.images.labels, return_index=True)
    number = min(MOST_IMAGES, len(classes))
    return [int(first[place * len(classes) // number]) for place in range(number)]


def describe_images(sample: Sample) -> Describe:
    """Patches by row and column, and the picture itself."""
    names, model = sample.task.class_names(), sample.task.recipe.model
    side = model.image_size // model.patch_size
    tokens: list[Token | None] = [
        Token("patch", f"row {row}, column {column}") for row in range(side) for column in range(side)
    ]

    def describe(batch: Batch, row: int, index: int) -> Content:
        pixels = sample.source.images.pixels([index], model.image_size)[0]
        return Content(names[int(batch["labels"][row])], tokens, _png(pixels))

    return describe


def describe_texts(sample: Sample) -> Describe:
    """Tokens by their text."""
    texts = token_texts(sample.task)

    def describe(batch: Batch, row: int, index: int) -> Content:
        ids = batch["ids"][row, :MOST_TOKENS].tolist()
        return Content(f"text {index}", [Token("token", texts[token]) for token in ids])

    return describe


def describe_journeys(sample: Sample) -> Describe:
    """Profile tokens by number, scenarios by weekday and hour, intentions by the category of the place."""
    categories = category_names(sample.task)

    def describe(batch: Batch, row: int, index: int) -> Content:
        scenario, place = batch["scenario"][row].tolist(), batch["place"][row].tolist()
        tokens: list[Token | None] = []
        for position, kind in enumerate(travel_types(batch)[row].tolist()):
            session = (position - PROFILE_TOKENS) // SESSION_TOKENS
            if kind == NO_LABEL:
                tokens.append(None)
                continue
            text = {
                "profile": lambda position=position: str(position + 1),
                "scenario": lambda session=session: _when(scenario[session]),
                "intention": lambda session=session: _coded(place[session][CATEGORY], categories),
                "feedback": lambda: "",
            }[TRAVEL_TYPES[kind]]()
            tokens.append(Token(TRAVEL_TYPES[kind], text))
        return Content(f"user window {index}", tokens)

    return describe


def describe_items(sample: Sample) -> Describe:
    """Items by number."""

    def describe(batch: Batch, row: int, index: int) -> Content:
        items = batch["items"][row].tolist()
        return Content(f"history {index}", [None if item == PADDING else Token("item", str(item)) for item in items])

    return describe


SHOWN: dict[str, Shown] = {
    "vision": Shown("image", one_a_class, describe_images),
    "language": Shown("text", spread, describe_texts),
    "travel": Shown("sessions", spread, describe_journeys),
    "sequences": Shown("items", spread, describe_items),
}
"""Task → how its examples are shown."""


def example_routing(model: nn.Module, sample: Sample, shown: Shown) -> ExampleRouting:
    """Run the model on some examples of the sample's split and note where their tokens go."""
    indices = shown.choose(sample)
    describe = shown.describe(sample)
    layers = choosing_layers(model)
    batch, log = sample.routed_examples(model, indices)
    found = [
        _show(index, describe(batch, row, index), {name: _of_example(log[name], row) for name in layers})
        for row, index in enumerate(indices)
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


def _png(pixels: np.ndarray) -> str:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def _when(codes: Sequence[int]) -> str:
    """ "Mon 08" of a scenario's codes."""
    weekday, hour = codes[SCENARIO.index("weekday")], codes[HOUR]
    return f"{_coded(weekday, WEEKDAYS)} {hour - 1:02}" if hour else _coded(weekday, WEEKDAYS)


def _coded(code: int, names: Sequence[str]) -> str:
    return names[code - 1] if code else "?"
