"""A batch of prompts being continued together, each as if it were alone.

Letters: ``b`` requests that are read together, ``T`` new tokens of each, ``V`` vocabulary.

Every request has its own temperature, length and random numbers: the n-th number of a request's seed decides its n-th
token, by where it falls in the cumulated probabilities. A request that has ended or was dropped is no longer computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from intbmoe.layer import moe_layers
from intbmoe.models.llama import Cache, LayerCache, Llama
from intbmoe.precision import wide
from intbmoe.tasks.language.vocabulary import Decoder, Vocabulary
from intbmoe.tasks.serving import Encoded, Piece


@dataclass
class Ongoing:
    index: int  # in the batch
    prompt: np.ndarray
    left: int  # tokens it may still get
    temperature: float
    random: np.random.Generator
    decoder: Decoder
    dropped: bool = False


@dataclass
class Together:
    """Requests that are read together, and what the model keeps of them."""

    requests: list[Ongoing]
    cache: Cache
    ids: Tensor  # (b, T), not yet read
    mask: Tensor | None


class Continuation:
    """An iterator over steps: each yields the pieces of all texts that are still going on."""

    def __init__(self, model: Llama, vocabulary: Vocabulary, batch: Sequence[Encoded]) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.ids: list[list[int]] = [[] for _ in batch]  # the new ids of each request so far
        self.scores = [0.0] * len(batch)
        """The log-probability of those, and of the end of the text where it was reached."""
        self._requests = [self._start(index, encoded) for index, encoded in enumerate(batch)]
        self._steps = self._run()

    def __iter__(self) -> Iterator[list[Piece]]:
        return self

    def __next__(self) -> list[Piece]:
        return next(self._steps)

    def drop(self, index: int) -> None:
        self._requests[index].dropped = True

    def _start(self, index: int, encoded: Encoded) -> Ongoing:
        payload = encoded.payload
        random = np.random.Generator(np.random.Philox(payload["seed"]))
        decoder = self.vocabulary.new_decoder()
        return Ongoing(index, payload["ids"], payload["max_tokens"], payload["temperature"], random, decoder)

    def _run(self) -> Iterator[list[Piece]]:
        groups = [self._read_together(requests) for requests in self._groups()]
        while groups:
            pieces = []
            for group in groups:
                pieces += self._step(group)
            yield sorted(pieces)
            groups = [smaller for group in groups if (smaller := _without_ended(group)) is not None]

    def _groups(self) -> list[list[Ongoing]]:
        """Everybody, or prompts of one length where a mixture counts positions: padding would be a position to it."""
        remembers = any(layer.new_state(1) is not None for _, layer in moe_layers(self.model))
        groups: dict[int, list[Ongoing]] = {}
        for request in self._requests:
            groups.setdefault(len(request.prompt) if remembers else 0, []).append(request)
        return list(groups.values())

    def _read_together(self, requests: list[Ongoing]) -> Together:
        """Prompts padded on the left, with room for all that is to come; the last token is never read."""
        device = self.model.embed_tokens.weight.device
        longest = max(len(request.prompt) for request in requests)
        ids = np.zeros((len(requests), longest), np.int64)
        mask = np.zeros(ids.shape, bool)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = request.prompt
            mask[row, longest - len(request.prompt) :] = True
        room = longest + max(request.left for request in requests) - 1
        padding = None if mask.all() else torch.from_numpy(mask).to(device)
        return Together(requests, self.model.new_cache(len(requests), room), torch.from_numpy(ids).to(device), padding)

    @torch.inference_mode()
    def _step(self, group: Together) -> list[Piece]:
        logits = self.model.next_logits(group.ids, group.mask, group.cache)
        # One number a step for each, drawn whether or not it is used, so that the n-th token has the n-th number.
        chance = [request.random.random() for request in group.requests]
        chosen = choose(logits, [request.temperature for request in group.requests], chance)
        group.ids, group.mask = chosen.unsqueeze(1), None
        scores = wide(logits).log_softmax(-1).gather(1, group.ids).squeeze(1)
        pieces = []
        for request, token, score in zip(group.requests, chosen.tolist(), scores.tolist(), strict=True):
            if request.left > 0 and not request.dropped:
                self.scores[request.index] += score
                pieces.append(self._take(request, token))
        return pieces

    def _take(self, request: Ongoing, token: int) -> Piece:
        if token == self.vocabulary.end_of_text:
            request.left = 0
            return Piece(request.index, request.decoder.end(), "stop")
        self.ids[request.index].append(token)
        request.left -= 1
        text = request.decoder.add(token)
        if request.left == 0:
            return Piece(request.index, text + request.decoder.end(), "length")
        return Piece(request.index, text, None)


def choose(logits: Tensor, temperatures: Sequence[float], chance: Sequence[float]) -> Tensor:
    """(b, V) → (b,): the likeliest where the temperature is 0, else the one in whose share ``chance`` falls."""
    greedy = logits.argmax(-1)
    if not any(temperatures):
        return greedy
    temperature, point = torch.tensor([temperatures, chance], dtype=torch.float64, device=logits.device).unsqueeze(-1)
    scores = logits.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1)
    summed = scores.softmax(-1).cumsum(-1)
    drawn = (summed <= point * summed[:, -1:]).sum(-1).clamp(max=logits.shape[1] - 1)
    return torch.where(temperature.squeeze(-1) > 0, drawn, greedy)


def _without_ended(group: Together) -> Together | None:
    """The group without requests that go no further; None where all have ended."""
    keep = [row for row, request in enumerate(group.requests) if request.left > 0 and not request.dropped]
    if not keep:
        return None
    remembers = any(layer.state is not None for layer in group.cache.layers)
    if len(keep) == len(group.requests) or remembers:  # a mixture's memory is its own: it cannot be cut
        return group
    rows = torch.tensor(keep, device=group.ids.device)
    old = group.cache
    layers = [LayerCache(layer.keys[rows], layer.values[rows], None, layer.held) for layer in old.layers]
    cache = Cache(layers, old.valid[rows], old.padded)
    return Together([group.requests[row] for row in keep], cache, group.ids[rows], None)
