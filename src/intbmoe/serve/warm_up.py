"""Before an engine is ready: its golden requests, alone and in batches, which check it, warm it up and time it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from intbmoe.export.golden import compare_answers
from intbmoe.serve.engine import Engine
from intbmoe.tasks.serving.requests import from_wire, to_wire

ROUNDS = 3


class BrokenModelError(RuntimeError):
    """A model does not answer as it did when it was exported; the message says where."""


def warm_up(engine: Engine, golden: Sequence[Mapping[str, Any]]) -> None:
    """Answer the golden requests as they will be in service, and let the batcher learn what they cost."""
    if not golden:
        raise BrokenModelError("the artifact has no golden requests, so that it cannot be checked: export it again")
    predictor = engine.predictor
    # Through the wire, because what is read from it is what the model will get.
    batch = [from_wire(to_wire(predictor.encode(entry["request"]))) for entry in golden]
    for number, encoded in enumerate(batch):
        _check(golden[number], predictor.answer([encoded])[0], f"golden request {number}")
    if hasattr(predictor, "record_graphs"):  # from here on answers come the way they will in service
        predictor.record_graphs(min(engine.batcher.queue, engine.batcher.batch_tokens))
    for _ in range(ROUNDS):
        for few in (batch[:1], batch):
            started = time.monotonic()
            answers = predictor.answer(few)
            engine.batcher.learn(len(few) * max(one.tokens for one in few), time.monotonic() - started)
            for number, answer in enumerate(answers):
                _check(golden[number], answer, f"golden request {number} in a batch of {len(few)}")
    if predictor.streams:
        for few in (batch[:1], batch) * ROUNDS:
            texts, started = predictor.stream(few), time.monotonic()
            next(texts)
            engine.batcher.step_cost.learn(len(few) * max(one.tokens for one in few), time.monotonic() - started)


def _check(entry: Mapping[str, Any], answer: dict[str, Any], which: str) -> None:
    difference = compare_answers(entry, answer)
    if difference is not None:
        raise BrokenModelError(f"{which} is answered otherwise than at export: {difference}")
