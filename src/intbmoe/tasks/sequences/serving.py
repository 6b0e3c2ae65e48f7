"""``recommend`` for item sequences: which item comes next after a history, out of all items."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from intbmoe.models.sequence import PADDING, SequenceConfig
from intbmoe.tasks.serving import fields
from intbmoe.tasks.serving.fields import REQUIRED, Field, Integer, Many, Record, recommend_fields
from intbmoe.tasks.serving.predictor import Exported, Predictor, blocks_of, recording
from intbmoe.tasks.serving.ranking import leave_out, ranked_results, top_n
from intbmoe.tasks.serving.requests import Answer, Encoded, Limits, Request, RequestError


@dataclass(frozen=True)
class ItemName:
    """An item by its name, which may be a number; it is read as the model's number of the item."""

    numbers: Mapping[str, int]

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "description": "The name of an item, as the data has it."}

    def read(self, where: str, value: object) -> int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        name = str(value) if whole else value
        if not isinstance(name, str) or name not in self.numbers:
            raise RequestError(where, value, f"one of the {len(self.numbers)} items that the model was trained on")
        return self.numbers[name]


class ItemPredictor(Predictor):
    """From histories to the next items, with their log-probabilities as scores."""

    action = "recommend"
    summary = "What comes next after a history, the likeliest first."
    form = fields.HISTORY_FORM

    def __init__(self, config: SequenceConfig, first_id: int = 0, names: Sequence[str] | None = None) -> None:
        """``first_id`` is the id of the model's item 0 in the data and in requests; ``names`` are the items' names."""
        self.config, self.first_id, self.names = config, first_id, names
        most = min(fields.MOST, config.items)
        self.limits = Limits(body_bytes=64 * 1024, top_n=most, history=fields.HISTORY)
        item: Field = Integer(first_id, first_id + config.items - 1, "The number of an item.")
        if names is not None:
            item = ItemName({name: number for number, name in enumerate(names)})
        about = f"Items from old to new; the model looks at the last {config.length}."
        history = Many(item, fields.HISTORY, least=1, about=about)
        some = [self.name_of(number % config.items) for number in (0, 1, 2)]
        example = {"history": some, "top_n": min(fields.TOP_N, most), "visited": "allow"}
        asked = {"history": (history, REQUIRED), **recommend_fields(most)}
        self._record = Record(asked, "A history of items.", [example])
        self.request_schema = self._record.schema()

    @classmethod
    def encoder(cls, artifact: Exported) -> "ItemPredictor":
        return cls(artifact.recipe.model, artifact.catalogue["first_id"], artifact.catalogue.get("items"))

    def name_of(self, item: int) -> int | str:
        """Return the name of the model's ``item`` in requests and answers."""
        return item + self.first_id if self.names is None else self.names[item]

    def encode(self, request: Request) -> Encoded:
        """Encode a request; the payload has ``items``, which the model uses, and ``excluded``."""
        found = self._record.read("", request)
        history = np.array(found["history"], np.int64) - self.first_id
        items = history[-self.config.length :]
        excluded = np.unique(history) if found["visited"] == "exclude" else history[:0]
        payload = {"items": items, "excluded": excluded, "top_n": found["top_n"], "explain": found["explain"]}
        return Encoded(len(items), payload)

    @torch.inference_mode()
    def answer(self, batch: Sequence[Encoded]) -> list[Answer]:
        if not batch:
            return []
        histories = [encoded.payload["items"] for encoded in batch]
        items = np.full((len(batch), max(map(len, histories))), PADDING, np.int64)
        for row, history in zip(items, histories, strict=True):
            row[: len(history)] = history
        with recording(self.model, batch) as log:
            scores = self.model(torch.from_numpy(items).to(self.device))
        leave_out(scores, [encoded.payload["excluded"] for encoded in batch])
        values, columns = top_n(scores, max(encoded.payload["top_n"] for encoded in batch))
        answers: list[Answer] = []
        for encoded, scores, items in zip(batch, values.tolist(), columns.tolist(), strict=True):
            payload = encoded.payload
            answer = {"results": ranked_results(list(map(self.name_of, items)), scores, payload["top_n"])}
            if payload["explain"]:
                answer["tokens"] = [f"item {self.name_of(item)}" for item in payload["items"].tolist()]
                answer["blocks"] = blocks_of(log, len(answers), slice(len(payload["items"])))
            answers.append(answer)
        return answers
