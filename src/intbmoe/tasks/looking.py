"""How a task tells its tokens apart and shows its examples, for ``intbmoe analyse``."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

NO_LABEL = -1  # the label of tokens that a view does not count: padding, and others it does not cover
BUCKETS = 8
MOST_EXAMPLES = 3
MOST_LISTED = 30  # names in an error message
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class View:
    name: str
    labels: tuple[str, ...]
    find: Callable[[Batch], Tensor]  # batch → (B, T) or (B, 1) indices into ``labels``, or ``NO_LABEL``
    words: tuple[tuple[str, ...], ...] = ()
    """Other names of each label, if ``--classes`` may choose among them; otherwise empty."""
    of_examples: Callable[[Any], np.ndarray] | None = None
    """Examples → the label of each, if all tokens of an example share it: then other examples need not be read."""

    def places_of(self, wanted: Sequence[str]) -> list[int]:
        """Return the indices of the wanted labels, each given by the label, another of its names, or its number."""
        known: dict[str, list[int]] = {}
        for place, words in enumerate(zip(self.labels, *zip(*self.words, strict=True), strict=True)):
            for word in {word.casefold() for word in words}:
                known.setdefault(word, []).append(place)
        found = []
        for word in wanted:
            number = [int(word)] if word.isdecimal() and int(word) < len(self.labels) else []
            places = known.get(word.casefold(), number)
            if not places:
                names = [words[0] for words in self.words]
                near = difflib.get_close_matches(word.casefold(), known, n=1)
                hint = f"did you mean {self.words[known[near[0]][0]][0]!r}?" if near else _some(names)
                raise ValueError(f"no {self.name} is called {word!r}: {hint}")
            if len(places) > 1:
                numbers = ", ".join(map(str, places))
                raise ValueError(f"{len(places)} labels of {self.name} are called {word!r}: give a number, {numbers}")
            found += places
        return list(dict.fromkeys(found))

    def narrowed(self, places: Sequence[int]) -> "View":
        """Return a view of only the labels at ``places``, in that order; other tokens have no label."""
        table = torch.full((len(self.labels) + 1,), NO_LABEL)  # the last entry, at index −1, is for NO_LABEL itself
        table[list(places)] = torch.arange(len(places))
        labels = tuple(self.labels[place] for place in places)
        words = tuple(self.words[place] for place in places)

        def find(batch: Batch) -> Tensor:
            found = self.find(batch)
            return table.to(found.device)[found]

        return View(self.name, labels, find, words)


def _some(names: Sequence[str]) -> str:
    if len(names) <= MOST_LISTED:
        return f"known: {', '.join(names)}"
    return f"there are {len(names)}, such as {', '.join(names[:3])}; their numbers 0 to {len(names) - 1} work too"


def position_view(length: int, valid: Callable[[Batch], Tensor]) -> View:
    """Return a view by position among ``length``, in ranges of equal length; ``valid`` says which are not padding."""
    stretch = -(-length // BUCKETS)
    starts = range(0, length, stretch)
    labels = tuple(f"{start}–{min(start + stretch, length) - 1}" for start in starts)

    def find(batch: Batch) -> Tensor:
        present = valid(batch)
        places = torch.arange(present.shape[1], device=present.device) // stretch
        return torch.where(present, places, NO_LABEL)

    return View("position", labels, find)


class Token(NamedTuple):
    """What a token is; None in its place means padding."""

    kind: str
    text: str


class Content(NamedTuple):
    title: str
    tokens: list[Token | None]  # in the order of the model's tokens
    image: str | None = None  # for images, a PNG of the pixels in base64


class Shown(NamedTuple):
    form: Literal["image", "text", "sessions", "items"]  # how the examples are drawn
    indices: list[int]  # which examples of the split, always the same
    describe: Callable[[Batch, int, int], Content]  # (batch, row, index in the split) → what the example is


def spread(total: int, count: int = MOST_EXAMPLES) -> list[int]:
    number = min(count, total)
    return [(2 * place + 1) * total // (2 * number) for place in range(number)]
