"""Decoding in slots: a cache of fixed size in which texts join and leave, and steps that a GPU replays from graphs.

A slot holds the keys and values of one text, from its first token on. A call reads some tokens of some texts (a part of
their prompts, or the token chosen last) and chooses the next token of each. Its whole input is one table with a row for
each text; its output is the chosen ids and their log-probabilities. Only keys and values stay on the device, so a graph
works for any texts in the slots. There is one graph for each number of texts and of tokens, rounded up.

Letters: ``B`` texts of a call, ``C`` tokens of each, ``S`` tokens that a slot has room for, ``w`` width of a head.

On the CPU the same code runs without graphs and without rounding up. Filler tokens are masked: no mixture counts them,
and their keys go to the last place of a slot (or to a slot without a text), which is never read.
"""

import weakref
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from intbmoe.graphs.recording import Mirror, Recorded, Recorder, addresses, halves, ladder
from intbmoe.layer import moe_layers
from intbmoe.models.sampling import Sampling, choose
from intbmoe.precision import autocast_dtype, wide

CHUNKS = (16, 64, 256)  # how many tokens of a prompt may be read at once
READERS = (1, 4, 16)  # how many prompts may be read at once
LEAST_EXTENT = 256  # attention over fewer places is no faster
ROUND = 64  # a slot's room is a multiple of this: attention wants masks with aligned rows
HEAD = 7  # columns of the table before the tokens: slot, start, count, temperature, chance, top_k, top_p


class Text(NamedTuple):
    """What a call needs to know about one text."""

    slot: int
    tokens: Sequence[int]  # to be read
    start: int  # the number of tokens that the slot already holds
    sampling: Sampling
    chance: float = 0.0  # the random number of the token to be chosen

    def after(self, token: int) -> "Text":
        """The same text, after ``tokens`` were read and ``token`` was chosen."""
        return self._replace(tokens=(token,), start=self.start + len(self.tokens))


class Chosen(NamedTuple):
    token: int
    score: float  # its log-probability


class Shape(NamedTuple):
    """The shape of a call; each has its own graph."""

    texts: int
    tokens: int
    prompts: bool  # whether a row's text may be in any slot; otherwise row i is slot i
    narrowed: bool  # whether the choice uses top_k and top_p
    extent: int  # the number of a slot's places that attention covers


def why_not_captured(model: nn.Module) -> str | None:
    """Why the texts of a model cannot be decoded in slots; None if they can. Only this function decides."""
    for name, layer in moe_layers(model):
        if layer.new_state(1) is not None:
            return f"{type(layer).__name__} ({name}) keeps its own state, which has no slots"
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        return "its parameters are sharded"
    if autocast_dtype(next(model.parameters())) is not None:
        return "under autocast the weights would be cast again for every token: cast the model instead"
    return None


class Slots:
    """Room for ``count`` texts of ``length`` tokens each."""

    def __init__(self, model: nn.Module, count: int, length: int, capture: bool = True) -> None:
        """With ``capture=False`` no graph is recorded, even on a GPU."""
        weight, config = model.embed_tokens.weight.detach(), model.config
        self._model, self.count, self.length = weakref.ref(model), count, length  # the model may keep these slots
        self.room = -(-(length + 1) // ROUND) * ROUND
        shape = (config.depth, count + 1, config.heads, self.room, config.head_dim)
        self.keys, self.values = (_zeros(shape, weight) for _ in range(2))
        self.rounds = weight.device.type == "cuda" and capture
        self.sizes = ladder(count)
        self.readers = (READERS[0], *(size for size, below in zip(READERS[1:], READERS, strict=False) if below < count))
        widest = max(count * (HEAD + 1), READERS[-1] * (HEAD + CHUNKS[-1]))
        self.input = Mirror(widest, torch.float64, weight.device)
        self.output = Mirror(2 * max(count, READERS[-1]), torch.float64, weight.device)
        aligned = {-(-part // ROUND) * ROUND for part in halves(self.room, LEAST_EXTENT)}
        self.extents = (*sorted(part for part in aligned if part < self.room), self.room)
        self.graphs: dict[Shape, Recorded] = {}
        statistics = [layer.statistics for _, layer in moe_layers(model)]
        self._recorder = Recorder(weight.device, statistics) if self.rounds else None
        self._addresses = addresses(self.model)

    @property
    def model(self) -> nn.Module:
        return self._model()

    def fits(self, count: int, length: int) -> bool:
        """Whether there is room, and the model's weights are still at the addresses that the graphs read."""
        return count <= self.count and length <= self.length and self._addresses == addresses(self.model)

    def record(self, narrowed: bool = False) -> None:
        """Record all graphs now, instead of each when it is first needed. Raises ``CaptureError``."""
        for texts, extent in product(reversed(self.sizes), self.extents):
            self._graph(Shape(texts, 1, False, narrowed, extent))
        for texts, tokens in product(reversed(self.readers), CHUNKS):
            self._graph(Shape(texts, tokens, True, narrowed, self.room))

    def prepare(self, texts: int, narrowed: bool) -> None:
        """Record the graph for a step of ``texts`` texts; raises ``CaptureError``."""
        self._graph(Shape(_at_least(texts, self.sizes), 1, False, narrowed, self.extents[0]))

    def read(self, prompts: Sequence[Text]) -> list[Chosen]:
        """Read prompts from their first token, a chunk at a time, and choose the next token of each."""
        most = READERS[-1]
        return [one for at in range(0, len(prompts), most) for one in self._read_together(prompts[at : at + most])]

    def _read_together(self, prompts: Sequence[Text]) -> list[Chosen]:
        found: dict[int, Chosen] = {}
        done = 0
        while len(found) < len(prompts):
            left = [row for row in range(len(prompts)) if row not in found]
            longest = max(len(prompts[row].tokens) for row in left) - done
            tokens = _at_least(longest, CHUNKS) if self.rounds else min(longest, CHUNKS[-1])
            parts = [
                prompts[row]._replace(tokens=prompts[row].tokens[done : done + tokens], start=done) for row in left
            ]
            done += tokens
            texts, extent = len(left), done
            if self.rounds:
                texts, extent = _at_least(texts, self.readers), self.room
            chosen = self._run(parts, Shape(texts, tokens, True, _narrowed(parts), extent), range(len(parts)))
            found |= {row: one for row, one in zip(left, chosen, strict=True) if len(prompts[row].tokens) <= done}
        return [found[row] for row in range(len(prompts))]

    def step(self, texts: Sequence[Text]) -> list[Chosen]:
        """Read one token of each text and choose the next."""
        rows = [text.slot for text in texts]
        size, extent = max(rows) + 1, max(text.start for text in texts) + 1
        if self.rounds:
            size, extent = _at_least(size, self.sizes), _at_least(extent, self.extents)
        return self._run(texts, Shape(size, 1, False, _narrowed(texts), extent), rows)

    @torch.inference_mode()
    def move(self, slot: int, to: int) -> None:
        """Move the text of a slot to another slot."""
        for held in (self.keys, self.values):
            held[:, to] = held[:, slot]

    @torch.inference_mode()
    def _run(self, texts: Sequence[Text], shape: Shape, rows: Sequence[int]) -> list[Chosen]:
        graph = self._graph(shape)  # first, because recording overwrites the table
        width = HEAD + shape.tokens
        table = self.input.array[: shape.texts * width].reshape(shape.texts, width)
        table[:] = 0
        table[:, 0] = self.count  # the slot without a text
        for row, text in zip(rows, texts, strict=True):
            limits = text.sampling.limits(self.model.config.vocabulary)
            table[row, :HEAD] = (
                text.slot, text.start, len(text.tokens), text.sampling.temperature, text.chance, *limits,
            )  # fmt: skip
            table[row, HEAD : HEAD + len(text.tokens)] = text.tokens
        self.input.to_device(table.size)
        graph()
        self.output.to_host(2 * shape.texts)
        ids, scores = self.output.array[: 2 * shape.texts].reshape(2, shape.texts).tolist()
        return [Chosen(int(ids[row]), scores[row]) for row in rows]

    @torch.inference_mode()
    def _graph(self, shape: Shape) -> Recorded:
        if self._recorder is None:
            return self._computing(shape)
        if shape not in self.graphs:
            # Recording runs the step. The table names no text, so that it writes only to the slot without a text.
            self.input.device.zero_()
            self.input.device[: shape.texts * (HEAD + shape.tokens) : HEAD + shape.tokens] = self.count
            self.graphs[shape] = self._recorder.record(self._computing(shape))
        return self.graphs[shape]

    def _computing(self, shape: Shape) -> Recorded:
        def compute() -> None:
            table = self.input.device[: shape.texts * (HEAD + shape.tokens)].view(shape.texts, -1)
            slot, start, count = table[:, :3].long().unbind(1)
            temperature, chance, *limits = table[:, 3:HEAD].unbind(1)
            reading = _Reading(self, shape, slot, start, count)
            # A single token needs no mask: it is always valid.
            mask = reading.valid if shape.texts * shape.tokens > 1 else None
            logits = self.model.next_logits(table[:, HEAD:].long(), mask, reading, (count - 1).clamp(min=0))
            chosen = choose(logits, temperature, chance, tuple(limits) if shape.narrowed else None)
            out = self.output.device[: 2 * shape.texts].view(2, shape.texts)
            out[0] = chosen
            out[1] = wide(logits).log_softmax(-1).gather(1, chosen.unsqueeze(1)).squeeze(1)

        return compute


class _Reading:
    """Acts as the model's cache during one call."""

    def __init__(self, slots: Slots, shape: Shape, slot: Tensor, start: Tensor, count: Tensor) -> None:
        number = torch.arange(shape.tokens, device=slot.device)
        self.valid = number < count.unsqueeze(1)  # (B, C)
        self.places = torch.where(self.valid, start.unsqueeze(1) + number, slots.room - 1)
        self.extent = shape.extent
        self.slot = slot if shape.prompts else None
        self.layers = [_Layer(self, *held) for held in zip(slots.keys, slots.values, strict=True)]

    def admit(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """(B, 1, C, S): 0 up to the token itself, −∞ elsewhere; an additive mask, which layers need not convert."""
        seen = torch.arange(self.extent, device=ids.device) <= self.places.unsqueeze(-1)
        hidden = torch.zeros_like(seen, dtype=self.layers[0].keys.dtype).masked_fill(~seen, -torch.inf)
        return hidden.unsqueeze(1)

    def positions(self, x: Tensor) -> Tensor:
        """(B, 1, C), the same for all heads."""
        return self.places.unsqueeze(1)


class _Layer:
    """The slots of one layer."""

    state = None

    def __init__(self, reading: _Reading, keys: Tensor, values: Tensor) -> None:
        self.reading, self.keys, self.values = reading, keys, values  # (slots, heads, S, w)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, heads, C, w) of new tokens; return those of all places, for use with the mask."""
        return self._extend(self.keys, k), self._extend(self.values, v)

    def _extend(self, held: Tensor, new: Tensor) -> Tensor:
        places, slot = self.reading.places, self.reading.slot
        if slot is None:
            held = held[: len(new)]
            held.scatter_(2, places[:, None, :, None].expand_as(new), new)
        else:
            held[slot.unsqueeze(1), :, places] = new.transpose(1, 2)
            held = held.index_select(0, slot)
        return held[:, :, : self.reading.extent]


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros, because attention multiplies masked values by zero, so they must not be NaN. A CPU allocates lazily."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * like.element_size(), np.uint8)).view(like.dtype).view(shape)


def _at_least(number: int, sizes: Sequence[int]) -> int:
    """The smallest of ``sizes`` that is at least ``number``; the largest if none is."""
    return next((size for size in sizes if size >= number), sizes[-1])


def _narrowed(texts: Sequence[Text]) -> bool:
    return any(text.sampling.narrowed for text in texts)
