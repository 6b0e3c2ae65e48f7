"""Where which tokens go: shares of token–block assignments, minus uniform, for each kind of token.

Every choice of a top-k selection is one assignment. The share of a block among the assignments of a kind of token,
minus one over the number of blocks, is 0 where the router does not care. It is at most 1/k − 1/K: k choices of a
token are k different blocks.

How the tokens of a task are told apart is said here, one function a task: its views.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.analysis.loads import choosing_layers, present_choices, unit_of
from intbmoe.analysis.sample import Sample
from intbmoe.models.sequence import PADDING
from intbmoe.models.travel import PROFILE_TOKENS, SESSION_TOKENS
from intbmoe.tasks.base import Batch, Task
from intbmoe.tasks.travel.city import CATEGORY_NAMES

NO_LABEL = -1
"""The label of tokens that a view does not count: padding, and what it does not speak of."""
BUCKETS = 8
TOKEN_KINDS = ("letters", "digits", "punctuation", "code symbols", "white space", "other")
PUNCTUATION = frozenset(".,;:!?'\"…–—‘’“”«»¡¿")
CODE_SYMBOLS = frozenset(string.punctuation) - PUNCTUATION
"""Brackets, operators and what else is rare in prose; '_' among them."""
TRAVEL_TYPES = ("profile", "scenario", "intention", "feedback")
HOUR, CATEGORY = 3, 2
"""Where a batch has the hour among a scenario's codes and the category among a place's; codes start at 1."""


@dataclass(frozen=True)
class View:
    """One way to tell tokens apart."""

    name: str
    labels: tuple[str, ...]
    find: Callable[[Batch], Tensor]
    """A batch → (B, T) or (B, 1) places in ``labels``, ``NO_LABEL`` for tokens that do not count."""


def vision_views(task: Task) -> list[View]:
    """Patches by the class of their image."""
    return [View("class", task.class_names(), lambda batch: batch["labels"].unsqueeze(1))]


def language_views(task: Task) -> list[View]:
    """Tokens by what they are made of, and by their place in the example."""
    data, texts = task.recipe.data, token_texts(task)
    kinds = torch.tensor([TOKEN_KINDS.index(kind_of(text)) for text in texts])
    return [
        View("kind of token", TOKEN_KINDS, lambda batch: kinds.to(batch["ids"].device)[batch["ids"]]),
        _position_view(data.length, lambda batch: torch.ones_like(batch["ids"], dtype=torch.bool)),
    ]


def travel_views(task: Task) -> list[View]:
    """Tokens by type, scenario tokens by the hour of day, intention tokens by the category of the place."""
    return [
        View("token type", TRAVEL_TYPES, travel_types),
        View("hour of day", tuple(f"{hour:02}" for hour in range(24)), lambda b: _session_codes(b, "scenario", HOUR)),
        View("category", category_names(task), lambda b: _session_codes(b, "intention", CATEGORY)),
    ]


def sequence_views(task: Task) -> list[View]:
    """Items by whether they stand earlier in the history too, and by their place in it."""
    return [
        View("visit", ("first", "again"), visits),
        _position_view(task.recipe.model.length, lambda batch: batch["items"] != PADDING),
    ]


VIEWS: dict[str, Callable[[Any], list[View]]] = {
    "vision": vision_views,
    "language": language_views,
    "travel": travel_views,
    "sequences": sequence_views,
}


def _position_view(length: int, valid: Callable[[Batch], Tensor]) -> View:
    """Tokens by their place among ``length``, in stretches of equal length."""
    stretch = -(-length // BUCKETS)
    starts = range(0, length, stretch)
    labels = tuple(f"{start}–{min(start + stretch, length) - 1}" for start in starts)

    def find(batch: Batch) -> Tensor:
        present = valid(batch)
        places = torch.arange(present.shape[1], device=present.device) // stretch
        return torch.where(present, places, NO_LABEL)

    return View("position", labels, find)


def category_names(task: Task) -> tuple[str, ...]:
    """The categories of places, code 1 first: names where the embedded journeys have them all, else codes."""
    from intbmoe.tasks.travel.task import open_data

    data = task.recipe.data
    known = open_data(data).sizes.categories - 1
    if data.source == "journeys" and known == len(CATEGORY_NAMES):
        return CATEGORY_NAMES
    return tuple(map(str, range(1, known + 1)))


def token_texts(task: Task) -> list[str]:
    """The text of each id of a language task."""
    data = task.recipe.data
    return byte_texts() if data.source == "stdlib" else tokenizer_texts(Path(data.path).expanduser())


def byte_texts() -> list[str]:
    """The text of each id where ids are bytes; none for 128 on, parts of characters, and for the end of a file."""
    return [chr(byte) for byte in range(128)] + [""] * 129


def tokenizer_texts(folder: Path) -> list[str]:
    """The text of each id of a prepared folder's tokenizer."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("telling tokens apart needs tokenizers: pip install 'intbmoe[text]'") from error
    from intbmoe.tasks.language.packed import TOKENIZER

    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    return [tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size(with_added_tokens=True))]


def kind_of(text: str) -> str:
    """One of ``TOKEN_KINDS``: what all characters of a token are, white space around them aside."""
    inner = text.strip()
    if text and not inner:
        return "white space"
    tests = {
        "letters": str.isalpha,
        "digits": str.isdigit,
        "punctuation": PUNCTUATION.__contains__,
        "code symbols": CODE_SYMBOLS.__contains__,
    }
    return next((kind for kind, test in tests.items() if inner and all(map(test, inner))), "other")


def travel_types(batch: Batch) -> Tensor:
    """(B, 6 + 3S) types, in the order of the travel model's tokens; padding has none."""
    mask = batch["mask"]
    profile = mask.new_zeros(len(mask), PROFILE_TOKENS, dtype=torch.int64)
    types = torch.arange(1, len(TRAVEL_TYPES), device=mask.device).expand(*mask.shape, SESSION_TOKENS)
    return torch.cat([profile, torch.where(mask.unsqueeze(2), types, NO_LABEL).flatten(1)], 1)


def _session_codes(batch: Batch, kind: str, column: int) -> Tensor:
    """(B, 6 + 3S): for tokens of one type, a code of their session from 0; the unknown (code 0) has no label."""
    codes = batch["place" if kind == "intention" else "scenario"][..., column].long() - 1
    spread = nn.functional.pad(codes.repeat_interleave(SESSION_TOKENS, 1), (PROFILE_TOKENS, 0), value=NO_LABEL)
    return torch.where(travel_types(batch) == TRAVEL_TYPES.index(kind), spread, NO_LABEL)


def visits(batch: Batch) -> Tensor:
    """(B, T): 1 where the item stands earlier in its row too, else 0; padding has no label."""
    items = batch["items"]
    earlier = torch.ones(items.shape[1], items.shape[1], dtype=torch.bool, device=items.device).tril(-1)
    again = ((items.unsqueeze(2) == items.unsqueeze(1)) & earlier).any(2)
    return torch.where(items != PADDING, again.long(), NO_LABEL)


@dataclass(frozen=True)
class LayerShares:
    """One layer."""

    layer: str
    choices: list[int]
    """Numbers of the blocks or experts: the columns."""
    counts: list[list[int]]
    """(labels, columns) assignments."""
    minus_uniform: list[list[float] | None]
    """Share minus uniform; None for a label without assignment."""


@dataclass(frozen=True)
class SharesOfView:
    """All layers, tokens told apart in one way."""

    name: str
    labels: list[str]
    layers: list[LayerShares]


@dataclass(frozen=True)
class RoutingShares:
    """All views of a task."""

    unit: str
    """What tokens are sent to: "block" or "expert"."""
    split: str
    examples: int
    views: list[SharesOfView]

    def rows(self) -> list[dict[str, Any]]:
        """One for each label with assignments and block or expert, for CSV."""
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
