"""Texts that are continued together, each as if it were alone; requests join and leave between two steps.

Every request has its own temperature, length and random numbers: the n-th number from a request's seed decides its n-th
token, by where it falls in the cumulative probabilities. A request that has ended or was dropped is no longer computed.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from intbmoe.models.llama import Cache, Llama
from intbmoe.models.sampling import Sampling, choose
from intbmoe.models.slots import Chosen, Slots, Text, why_not_captured
from intbmoe.precision import wide
from intbmoe.tasks.language.vocabulary import Decoder, Vocabulary
from intbmoe.tasks.serving import Encoded, Piece


@dataclass
class Ongoing:
    owner: "weakref.ref[Continuation]"
    index: int  # in the owner's batch
    text: Text  # what to read next, and where; its slot is −1 until it has one
    left: int  # tokens it may still get
    random: np.random.Generator
    decoder: Decoder
    dropped: bool = False

    @property
    def going(self) -> bool:
        return self.left > 0 and not self.dropped and self.owner() is not None


class Writer:
    """Writes up to ``slots`` texts of up to ``length`` tokens at a time; others wait until one of them ends."""

    def __init__(self, model: Llama, vocabulary: Vocabulary, slots: int, length: int, capture: bool = True) -> None:
        self.vocabulary, self._count = vocabulary, slots
        tokenwise = why_not_captured(model) is None
        self.slots = Slots(model, slots, length, capture) if tokenwise else _OneByOne(model, length)
        self._waiting: list[Ongoing] = []
        self._writing: list[Ongoing] = []

    def add(self, requests: Sequence[Ongoing]) -> None:
        self._waiting += requests

    def step(self) -> None:
        """Write one more token of every text; its pieces go to the request's continuation."""
        try:
            self._leave()
            old, new = self._writing, self._join()
            chosen = self.slots.step([self._next(request) for request in old]) if old else []
            chosen += self.slots.read([self._next(request) for request in new]) if new else []
        except Exception:
            for request in (*self._writing, *self._waiting):
                request.dropped = True
            raise
        self._writing = old + new
        for request, one in zip(self._writing, chosen, strict=True):
            owner = request.owner()
            if owner is not None:
                owner.take(request, one, self.vocabulary.end_of_text)

    @staticmethod
    def _next(request: Ongoing) -> Text:
        # Draw a number for each token, even if it is not used, so that the n-th token has the n-th number.
        return request.text._replace(chance=request.random.random())

    def _leave(self) -> None:
        """Forget requests that have ended, and move those in the last slots to free slots before them."""
        self._waiting = [request for request in self._waiting if request.going]
        self._writing = sorted((one for one in self._writing if one.going), key=lambda one: one.text.slot)
        free = sorted(set(range(len(self._writing))) - {one.text.slot for one in self._writing})
        for request in self._writing[len(self._writing) - len(free) :]:
            to = free.pop(0)
            self.slots.move(request.text.slot, to)
            request.text = request.text._replace(slot=to)

    def _join(self) -> list[Ongoing]:
        room = self._count - len(self._writing)
        new, self._waiting = self._waiting[:room], self._waiting[room:]
        for slot, request in enumerate(new, len(self._writing)):
            request.text = request.text._replace(slot=slot)
        return new


class Continuation:
    """An iterator over steps: each yields the pieces of all texts of one batch that are still being written.

    A step of one batch is a step of all batches of the same writer: their pieces wait until they are requested.
    """

    def __init__(self, writer: Writer, batch: Sequence[Encoded]) -> None:
        self._writer = writer
        self.ids: list[list[int]] = [[] for _ in batch]  # the new ids of each request so far
        self.scores = [0.0] * len(batch)
        """The log-probability of these ids, and of the end of the text if it was reached."""
        self._pieces: list[Piece] = []
        self._requests = [self._start(index, encoded) for index, encoded in enumerate(batch)]
        writer.add(self._requests)

    def _start(self, index: int, encoded: Encoded) -> Ongoing:
        payload = encoded.payload
        text = Text(-1, payload["ids"].tolist(), 0, Sampling(temperature=float(payload["temperature"])))
        random = np.random.Generator(np.random.Philox(payload["seed"]))
        decoder = self._writer.vocabulary.new_decoder()
        return Ongoing(weakref.ref(self), index, text, payload["max_tokens"], random, decoder)

    def __iter__(self) -> Iterator[list[Piece]]:
        return self

    def __next__(self) -> list[Piece]:
        while not self._pieces:
            if not any(request.going for request in self._requests):
                raise StopIteration
            self._writer.step()
        pieces, self._pieces = sorted(self._pieces), []
        return pieces

    def drop(self, index: int) -> None:
        self._requests[index].dropped = True

    def take(self, request: Ongoing, chosen: Chosen, end_of_text: int) -> None:
        """Take the token that a step of the writer has chosen for one of the requests."""
        self.scores[request.index] += chosen.score
        if chosen.token == end_of_text:
            request.left, text, finished = 0, "", "stop"
        else:
            self.ids[request.index].append(chosen.token)
            request.text = request.text.after(chosen.token)
            request.left -= 1
            text, finished = request.decoder.add(chosen.token), None if request.left else "length"
        if finished:
            text += request.decoder.end()
        self._pieces.append(Piece(request.index, text, finished))


class _OneByOne:
    """Used instead of slots if mixtures keep their own state: each text has its own cache."""

    def __init__(self, model: Llama, length: int) -> None:
        self._model, self._length = model, length
        self._caches: dict[int, Cache] = {}

    def read(self, prompts: Sequence[Text]) -> list[Chosen]:
        for text in prompts:
            self._caches[text.slot] = self._model.new_cache(1, self._length)
        return self.step(prompts)

    def step(self, texts: Sequence[Text]) -> list[Chosen]:
        return [self._step(text) for text in texts]

    @torch.inference_mode()
    def _step(self, text: Text) -> Chosen:
        ids = torch.tensor([text.tokens], device=self._model.embed_tokens.weight.device)
        logits = self._model.next_logits(ids, None, self._caches[text.slot])
        temperature, chance = logits.new_tensor([[text.sampling.temperature], [text.chance]], dtype=torch.float64)
        chosen = choose(logits, temperature, chance)
        return Chosen(int(chosen), float(wide(logits).log_softmax(-1)[0, chosen]))

    def move(self, slot: int, to: int) -> None:
        self._caches[to] = self._caches.pop(slot)
