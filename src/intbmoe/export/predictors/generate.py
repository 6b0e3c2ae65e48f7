"""``generate``: a prompt to its continuation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from intbmoe.export.predictor import Answer, Encoded, Limits, Request, RequestError
from intbmoe.export.predictors.continuation import Continuation
from intbmoe.export.predictors.explain import blocks_of, recording
from intbmoe.export.predictors.fields import EXPLAIN, REQUIRED, Flag, Integer, Number, Record, Text
from intbmoe.export.predictors.text import Vocabulary, read_vocabulary
from intbmoe.export.predictors.types import narrowest_type
from intbmoe.models.llama import Llama

if TYPE_CHECKING:
    from intbmoe.export.artifact import Artifact

MAX_TOKENS = 64
HOTTEST = 10.0
LARGEST_SEED = 2**53 - 1
"""The largest whole number that every JSON reader keeps."""


class GenerateEncoder:
    """Prompts to token ids."""

    action = "generate"

    def __init__(self, vocabulary: Vocabulary, length: int) -> None:
        """``length`` is how many tokens the model was trained to see: the most of a prompt, and of new ones."""
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

    def encode(self, request: Request) -> Encoded:
        """See ``Encoder``; the payload has the prompt's ``ids``."""
        found = self._record.read("", request)
        ids = self.vocabulary.encode(found["prompt"])
        if len(ids) > self.length:
            raise RequestError("prompt", found["prompt"], f"at most {self.length} tokens (it has {len(ids)})")
        # A text begins where another has ended.
        payload = {"ids": np.array(ids or [self.vocabulary.end_of_text], np.int64)}
        payload |= {name: found[name] for name in ("max_tokens", "temperature", "seed", "stream", "explain")}
        return Encoded(len(payload["ids"]) + found["max_tokens"], payload)


class GeneratePredictor(GenerateEncoder):
    """Token ids to text."""

    def __init__(self, vocabulary: Vocabulary, length: int, model: Llama) -> None:
        super().__init__(vocabulary, length)
        self.model = model
        self.dtype, self.device = narrowest_type(model), next(model.parameters()).device

    @staticmethod
    def encoder(artifact: "Artifact") -> GenerateEncoder:
        """From the artifact's vocabulary."""
        return GenerateEncoder(read_vocabulary(artifact), artifact.recipe.data.length)

    @staticmethod
    def load(artifact: "Artifact", device: str | torch.device) -> "GeneratePredictor":
        """With the artifact's model."""
        return GeneratePredictor(read_vocabulary(artifact), artifact.recipe.data.length, artifact.model(device))

    def with_model(self, model: Llama) -> "GeneratePredictor":
        """The same with another model."""
        return GeneratePredictor(self.vocabulary, self.length, model)

    def stream(self, batch: Sequence[Encoded]) -> Continuation:
        """See ``StreamingPredictor``."""
        return Continuation(self.model, self.vocabulary, batch)

    def answer(self, batch: Sequence[Encoded]) -> list[Answer]:
        """The pieces of ``stream`` joined: the ``text``, its log-probability as ``score``, and why it ``finished``."""
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
        """See ``StreamingPredictor``: reads the whole text once more; the last token was written and never read."""
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


def continue_text(path: Path, request: Request, device: str) -> Iterator[str]:
    """The continuation of a prompt by the language model of an artifact, piece by piece."""
    from intbmoe.export.artifact import ArtifactError, load_artifact

    artifact = load_artifact(path)
    if artifact.task != "language":
        raise ArtifactError(f"{path} is a model of the task {artifact.task!r}: generate needs one of 'language'")
    predictor = GeneratePredictor.load(artifact, device)
    for pieces in predictor.stream([predictor.encode(request)]):
        yield from (piece.text for piece in pieces)
