"""``generate``: from a prompt to its continuation."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from intbmoe.graphs.recording import CaptureError
from intbmoe.models.llama import Llama
from intbmoe.models.slots import why_not_captured
from intbmoe.tasks.language.continuation import Continuation, Writer
from intbmoe.tasks.language.packed import TokenExamples
from intbmoe.tasks.language.vocabulary import Vocabulary, read_vocabulary
from intbmoe.tasks.serving.fields import EXPLAIN, REQUIRED, Flag, Integer, Number, Record, Text
from intbmoe.tasks.serving.predictor import Exported, Predictor, blocks_of, recording
from intbmoe.tasks.serving.requests import Answer, Encoded, Limits, Request, RequestError, spread_evenly

MAX_TOKENS = 64
PROMPT_TOKENS, NEW_TOKENS = 32, 16  # in a golden request
HOTTEST = 10.0
LARGEST_SEED = 2**53 - 1  # the largest integer that every JSON reader keeps exactly
log = logging.getLogger(__name__)


class GeneratePredictor(Predictor):
    action = "generate"
    summary = "Continue a text."
    streams = True
    form = Path(__file__).with_name("text.js")

    def __init__(self, vocabulary: Vocabulary, length: int) -> None:
        """``length`` is how many tokens the model was trained to see: the limit of a prompt, and of new tokens."""
        self.vocabulary, self.length = vocabulary, length
        letters = length * vocabulary.characters_per_token
        self.limits = Limits(body_bytes=12 * letters + 4096, prompt_tokens=length, max_tokens=length)
        fields = {
            "prompt": (Text(letters, f"At most {length} tokens. Empty for a new text."), REQUIRED),
            "max_tokens": (Integer(1, length, "Most new tokens."), min(MAX_TOKENS, length)),
            "temperature": (Number(0, HOTTEST, "0 takes the likeliest token; more is more varied."), 0.0),
            "seed": (Integer(0, LARGEST_SEED, "Decides what is drawn where the temperature is not 0."), 0),
            "stream": (Flag("Whether the text comes piece by piece."), True),
            "explain": EXPLAIN,
        }
        example = {"prompt": "import ", "max_tokens": min(MAX_TOKENS, length), "temperature": 0.0, "stream": False}
        self._record = Record(fields, "A text to continue.", [example])
        self.request_schema = self._record.schema()

    @classmethod
    def encoder(cls, artifact: Exported) -> "GeneratePredictor":
        return cls(read_vocabulary(artifact), artifact.recipe.data.length)

    def encode(self, request: Request) -> Encoded:
        found = self._record.read("", request)
        ids = self.vocabulary.encode(found["prompt"])
        if len(ids) > self.length:
            raise RequestError("prompt", found["prompt"], f"at most {self.length} tokens (it has {len(ids)})")
        # A new text begins where another has ended.
        payload = {"ids": np.array(ids or [self.vocabulary.end_of_text], np.int64)}
        payload |= {name: found[name] for name in ("max_tokens", "temperature", "seed", "stream", "explain")}
        return Encoded(len(payload["ids"]) + found["max_tokens"], payload)

    def use(self, model: Llama) -> None:
        super().use(model)
        self._writer: Writer | None = None  # shared by all batches, once ``record_graphs`` was called

    def record_graphs(self, texts: int) -> None:
        """Write up to ``texts`` texts together from now on; on a GPU, record the graphs that a step replays."""
        reason = why_not_captured(self.model)
        self._writer = self._new_writer(texts, 2 * self.length)
        if reason is not None:
            log.info("texts are written one by one, kernel by kernel: %s", reason)
        elif self.device.type == "cuda":
            started = time.monotonic()
            try:
                self._writer.slots.record()
            except CaptureError as error:
                message = "the model cannot be captured, so every step is launched kernel by kernel: %s"
                log.warning(message, error, exc_info=True)
                self._writer = self._new_writer(texts, 2 * self.length, capture=False)
            else:
                seconds = time.monotonic() - started
                log.info(
                    "%d graphs recorded in %.1f s, for up to %d texts", len(self._writer.slots.graphs), seconds, texts
                )

    def _new_writer(self, slots: int, length: int, capture: bool = True) -> Writer:
        return Writer(self.model, self.vocabulary, slots, length, capture)

    def stream(self, batch: Sequence[Encoded]) -> Continuation:
        """Continue texts: all calls share a writer once ``record_graphs`` was called, otherwise each has its own."""
        if self._writer is not None:
            return Continuation(self._writer, batch)
        longest = max((encoded.tokens for encoded in batch), default=1)
        return Continuation(self._new_writer(max(1, len(batch)), longest), batch)

    def answer(self, batch: Sequence[Encoded]) -> list[Answer]:
        """Join the pieces of ``stream``: the ``text``, its log-probability as ``score``, and why it ``finished``."""
        continuation = self.stream(batch)
        answers: list[Answer] = [{"text": ""} for _ in batch]
        for pieces in continuation:
            for piece in pieces:
                answer = answers[piece.index]
                answer["text"] += piece.text
                if piece.finished is not None:
                    answer["score"] = continuation.scores[piece.index]
                    answer["new_tokens"] = len(continuation.ids[piece.index])
                    answer["finished"] = piece.finished
        for answer, encoded, new in zip(answers, batch, continuation.ids, strict=True):
            if encoded.payload["explain"]:
                answer |= self.explain(encoded, new)
        return answers

    @torch.inference_mode()
    def explain(self, encoded: Encoded, new: Sequence[int]) -> Answer:
        """Read the whole text again, without the last token, which was written but never read."""
        ids = [*encoded.payload["ids"].tolist(), *new]
        read = ids[: max(1, len(ids) - 1)] if new else ids
        with recording(self.model, [encoded]) as log:
            self.model(torch.tensor([read], device=self.device))
        return {"tokens": [self._name(token) for token in read], "blocks": blocks_of(log, 0, slice(None))}

    def _name(self, token: int) -> str:
        if token == self.vocabulary.end_of_text:
            return "end of text"
        decoder = self.vocabulary.new_decoder()
        return decoder.add(token) + decoder.end()


def prompt_requests(predictor: GeneratePredictor, split: TokenExamples, count: int) -> list[Request]:
    requests, vocabulary = [], predictor.vocabulary
    for index in spread_evenly(len(split), count):
        start = index * split.length
        decoder = vocabulary.new_decoder()
        # Cut where a document ends, and where a character ends: an incomplete one stays in the decoder.
        ids = split.tokens[start : start + min(PROMPT_TOKENS, split.length // 2)].tolist()
        ids = ids[: ids.index(vocabulary.end_of_text)] if vocabulary.end_of_text in ids else ids
        text = "".join(map(decoder.add, ids)).lstrip("\ufffd")
        requests.append({"prompt": text, "max_tokens": min(NEW_TOKENS, predictor.length), "temperature": 0.0})
    return requests
