"""The engine without its process: requests in, batches through the predictor, replies out.

The caller passes messages to ``submit`` and ``cancel``; ``step`` computes one batch, and one more token of every text
being written, and returns the replies. A single thread does all of it: while the model computes, new requests wait in
the sockets, and the next ``step`` finds them together. ``warm_up`` checks and times a model before it serves.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from intbmoe.export.golden import compare_answers
from intbmoe.layer import moe_layers
from intbmoe.routing import record_routing
from intbmoe.serve.batcher import Batcher, CostModel, Taken, Ticket
from intbmoe.serve.messages import ANSWER, BAD, CANCEL, EXPIRED, FAILED, PIECE, REFUSED
from intbmoe.serve.metrics import EngineMetrics
from intbmoe.serve.settings import Settings
from intbmoe.tasks.serving import Predictor, RequestError
from intbmoe.tasks.serving.requests import from_wire, to_wire

SAMPLE_EVERY_S = 1.0
"""Routing is recorded in one batch per second: often enough to show the load, too rarely to cost anything."""
WARM_UP_ROUNDS = 3
log = logging.getLogger(__name__)


class Reply(NamedTuple):
    key: Hashable
    kind: str
    content: tuple[Any, ...] = ()


@dataclass
class _Text:
    stream: Any
    tickets: list[Ticket]
    going: set[int]
    unread: int  # padded tokens of the prompts, until the first (and longest) step has read them
    pieces: dict[int, list[str]] = field(default_factory=dict)  # so far, for texts that are sent whole


class Engine:
    def __init__(
        self,
        predictor: Predictor,
        settings: Settings,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.predictor = predictor
        self.batcher = Batcher(
            budget_s=settings.budget_ms / 1000, batch_tokens=settings.batch_tokens, queue=settings.queue, clock=clock
        )
        if predictor.streams:
            self.batcher.step_cost = CostModel()
        self._most_texts = settings.streams
        self._metrics = metrics or EngineMetrics("")
        self.clock = clock
        self._texts: list[_Text] = []
        model = getattr(predictor, "model", None)
        chooses = model is not None and any(layer.choices for _, layer in moe_layers(model))
        self._routing_model = model if chooses else None
        self._sampled = float("-inf")

    @property
    def most_together(self) -> int:
        """The number of requests that may be computed at a time."""
        return self._most_texts if self.predictor.streams else min(self.batcher.queue, self.batcher.batch_tokens)

    @property
    def busy(self) -> bool:
        return len(self.batcher) > 0 or bool(self._texts)

    def submit(
        self, key: Hashable, deadline: float, content: bytes, stream: bool, sent: float | None = None
    ) -> Reply | None:
        """Accept a request that has waited since it was ``sent`` (None), or say why it is refused."""
        encoded = from_wire(content)
        arrived = self.clock() if sent is None else sent
        refusal = self.batcher.submit(Ticket(key, encoded.tokens, deadline, encoded, stream, arrived))
        return None if refusal is None else Reply(key, REFUSED, (refusal.reason, refusal.retry_after))

    def receive(self, kind: str, key: Hashable, *content: Any) -> list[Reply]:
        """Handle a front's message, ``ASK`` or ``CANCEL``; only a refusal is replied at once."""
        if kind == CANCEL:
            self.cancel(key)
            return []
        refusal = self.submit(key, *content)
        return [] if refusal is None else [refusal]

    def cancel(self, key: Hashable) -> None:
        if not self.batcher.cancel(key):
            self._drop_texts(lambda other: other == key)

    def cancel_all(self, which: Callable[[Hashable], bool]) -> None:
        for key in [key for key in self.batcher.waiting() if which(key)]:
            self.batcher.cancel(key)
        self._drop_texts(which)

    def _drop_texts(self, which: Callable[[Hashable], bool]) -> None:
        for text in self._texts:
            for index in [index for index in text.going if which(text.tickets[index].key)]:
                text.going.discard(index)
                text.stream.drop(index)

    def step(self) -> list[Reply]:
        replies: list[Reply] = []
        room = self._most_texts - sum(len(text.going) for text in self._texts)
        if room > 0:
            taken = self.batcher.take(room if self.predictor.streams else None)
            replies += [Reply(ticket.key, EXPIRED) for ticket in taken.expired]
            if taken.batch:
                self._count(taken)
                replies += self._start(taken.batch) if self.predictor.streams else self._answer(taken)
        if self._texts:
            replies += self._write()
        self._metrics.waiting.set(len(self.batcher))
        return replies

    def _answer(self, taken: Taken) -> list[Reply]:
        started = self.clock()
        batch = [ticket.encoded for ticket in taken.batch]
        try:
            with self._sampling():
                answers = self.predictor.answer(batch)
                seconds = self.clock() - started
        except Exception:
            log.exception("a batch of %d failed; retrying its requests one by one", len(batch))
            return [self._answer_alone(ticket) for ticket in taken.batch]
        self.batcher.cost.learn(taken.padded_tokens, seconds)
        self._metrics.compute_seconds.observe(seconds)
        return [Reply(ticket.key, ANSWER, (answer,)) for ticket, answer in zip(taken.batch, answers, strict=True)]

    def _answer_alone(self, ticket: Ticket) -> Reply:
        try:
            return Reply(ticket.key, ANSWER, (self.predictor.answer([ticket.encoded])[0],))
        except Exception as error:
            return _failure(ticket, error)

    def _start(self, tickets: list[Ticket]) -> list[Reply]:
        try:
            stream = self.predictor.stream([ticket.encoded for ticket in tickets])
        except Exception as error:
            if len(tickets) == 1:
                return [_failure(tickets[0], error)]
            return [reply for ticket in tickets for reply in self._start([ticket])]
        self._texts.append(_Text(stream, tickets, set(range(len(tickets))), Taken(tickets).padded_tokens))
        return []

    def _write(self) -> list[Reply]:
        """Write one more token of every text; a predictor may compute those of all batches together."""
        started, unread = self.clock(), sum(text.unread for text in self._texts)
        replies = [reply for text in self._texts for reply in self._continue(text)]
        seconds = self.clock() - started
        if unread:
            self.batcher.step_cost.learn(unread, seconds)
        self._metrics.compute_seconds.observe(seconds)
        self._texts = [text for text in self._texts if text.going]
        return replies

    def _continue(self, text: _Text) -> list[Reply]:
        text.unread = 0
        try:
            with self._sampling():
                pieces = next(text.stream, None)
            if pieces is None:
                raise RuntimeError("the predictor ended the texts early")
        except Exception as error:
            failed, text.going = text.going, set()
            return [_failure(text.tickets[index], error) for index in sorted(failed)]
        replies = []
        for piece in pieces:
            if piece.index not in text.going:
                continue
            ticket = text.tickets[piece.index]
            if ticket.streamed:
                replies.append(Reply(ticket.key, PIECE, (piece.text, piece.finished)))
            else:
                text.pieces.setdefault(piece.index, []).append(piece.text)
                if piece.finished is not None:
                    replies.append(self._answer_whole(text, piece.index, piece.finished))
            if piece.finished is not None:
                text.going.discard(piece.index)
        return replies

    def _answer_whole(self, text: _Text, index: int, finished: str) -> Reply:
        """Do the same as ``Predictor.answer``, which would make other requests wait for the whole text."""
        ticket, ids = text.tickets[index], text.stream.ids[index]
        answer = {"text": "".join(text.pieces[index]), "new_tokens": len(ids), "score": text.stream.scores[index]}
        try:
            wanted = ticket.encoded.payload.get("explain")
            explained = self.predictor.explain(ticket.encoded, ids) if wanted else {}
        except Exception as error:
            return _failure(ticket, error)
        return Reply(ticket.key, ANSWER, ({**answer, "finished": finished, **explained},))

    def _count(self, taken: Taken) -> None:
        now = self.clock()
        self._metrics.batch_requests.observe(len(taken.batch))
        useful = sum(ticket.tokens for ticket in taken.batch)
        self._metrics.tokens.labels("request").inc(useful)
        self._metrics.tokens.labels("padding").inc(taken.padded_tokens - useful)
        for ticket in taken.batch:
            self._metrics.queue_seconds.observe(now - ticket.arrived)

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        if self._routing_model is None or self.clock() - self._sampled < SAMPLE_EVERY_S:
            yield
            return
        self._sampled = self.clock()
        with record_routing(self._routing_model) as routing:
            yield
        for layer, recorded in routing.items():
            if recorded.ids is None:
                continue
            ids = recorded.ids.cpu().numpy()
            for block, count in enumerate(np.bincount(ids[ids >= 0]).tolist()):
                if count:
                    self._metrics.block_tokens.labels(layer, block).inc(count)


def _failure(ticket: Ticket, error: Exception) -> Reply:
    if isinstance(error, RequestError):
        return Reply(ticket.key, BAD, (error.field, str(error)))
    if isinstance(error, torch.AcceleratorError):
        raise error  # the GPU is unusable in this process: let the process end, its requests go to another engine
    log.error("a request failed", exc_info=error)
    return Reply(ticket.key, FAILED, ("the model failed on this request; see the server's log",))


class BrokenModelError(RuntimeError):
    """A model answers differently than at export; the message says where."""


def warm_up(engine: Engine, golden: Sequence[Mapping[str, Any]]) -> None:
    """Run the golden requests, alone and in batches: this checks the model, warms it up and times it."""
    if not golden:
        raise BrokenModelError("the artifact has no golden requests, so it cannot be checked: export it again")
    predictor = engine.predictor
    # Encoded for sending and decoded again, as in service.
    batch = [from_wire(to_wire(predictor.encode(entry["request"]))) for entry in golden]
    for number, encoded in enumerate(batch):
        _check(golden[number], predictor.answer([encoded])[0], f"golden request {number}")
    if hasattr(predictor, "record_graphs"):  # from here on answers are computed as in service
        predictor.record_graphs(engine.most_together)
    for _ in range(WARM_UP_ROUNDS):
        for few in (batch[:1], batch):
            started = engine.clock()
            answers = predictor.answer(few)
            engine.batcher.cost.learn(len(few) * max(one.tokens for one in few), engine.clock() - started)
            for number, answer in enumerate(answers):
                _check(golden[number], answer, f"golden request {number} in a batch of {len(few)}")
    if predictor.streams:
        for few in (batch[:1], batch) * WARM_UP_ROUNDS:
            texts, started = predictor.stream(few), engine.clock()
            next(texts)
            engine.batcher.step_cost.learn(len(few) * max(one.tokens for one in few), engine.clock() - started)


def _check(entry: Mapping[str, Any], answer: dict[str, Any], which: str) -> None:
    difference = compare_answers(entry, answer)
    if difference is not None:
        raise BrokenModelError(f"{which} is answered differently than at export: {difference}")
