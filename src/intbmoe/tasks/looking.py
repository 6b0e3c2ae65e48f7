"""How a task's tokens are told apart and its examples are shown, for ``intbmoe analyse``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

NO_LABEL = -1  # the label of tokens that a view does not count: padding, and what it does not speak of
BUCKETS = 8
MOST_EXAMPLES = 3
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class View:
    name: str
    labels: tuple[str, ...]
    find: Callable[[Batch], Tensor]  # batch → (B, T) or (B, 1) places in ``labels``, or ``NO_LABEL``


def position_view(length: int, valid: Callable[[Batch], Tensor]) -> View:
    """Tokens by their place among ``length``, in stretches of equal length; ``valid`` says which are no padding."""
    stretch = -(-length // BUCKETS)
    starts = range(0, length, stretch)
    labels = tuple(f"{start}–{min(start + stretch, length) - 1}" for start in starts)

    def find(batch: Batch) -> Tensor:
        present = valid(batch)
        places = torch.arange(present.shape[1], device=present.device) // stretch
        return torch.where(present, places, NO_LABEL)

    return View("position", labels, find)


class Token(NamedTuple):
    """What a token is; None in its place is padding."""

    kind: str
    text: str


class Content(NamedTuple):
    title: str
    tokens: list[Token | None]  # in the order of the model's tokens
    image: str | None = None  # of images, a PNG of its pixels in base64


class Shown(NamedTuple):
    form: Literal["image", "text", "sessions", "items"]  # how they are drawn
    indices: list[int]  # which examples of the split, always the same
    describe: Callable[[Batch, int, int], Content]  # (batch, row, index in the split) → what the example is


def spread(total: int, count: int = MOST_EXAMPLES) -> list[int]:
    number = min(count, total)
    return [(2 * place + 1) * total // (2 * number) for place in range(number)]
