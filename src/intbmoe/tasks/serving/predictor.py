"""From a request to an answer: what a server, the command line and golden requests need from a task.

    encode    JSON → arrays, or a ``RequestError`` that names the field; needs the catalogue or vocabulary, not weights
    answer    a batch of encoded requests → JSON, in one padded call of the model

An answer depends only on its own request: the rest of the batch changes it by no more than rounding.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from intbmoe.layer import moe_layers
from intbmoe.routing import RecordedRouting, record_routing
from intbmoe.tasks.serving.requests import Answer, Encoded, Limits, Request


@dataclass(frozen=True)
class Catalogue:
    """The meaning of a model's inputs and outputs: what an export stores about a task's data."""

    about: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the larger parts of it
    files: dict[str, bytes] = field(default_factory=dict)  # whole files that belong to it, by name


class Exported(Protocol):
    """What a predictor is made from: an artifact (``intbmoe.export``)."""

    recipe: Any
    catalogue: dict[str, Any]
    catalogue_tensors: dict[str, Tensor]

    def file(self, name: str) -> Path: ...

    def model(self, device: str | torch.device) -> nn.Module: ...


class Predictor:
    """Encodes requests and, with a model, answers them; subclasses define ``encoder``, ``encode`` and ``answer``."""

    action: ClassVar[str]
    """What it does, as a verb: requests go to /v1/ACTION."""
    summary: ClassVar[str] = "Ask the model."
    """What ``action`` does, in one sentence."""
    streams: ClassVar[bool] = False
    """Whether answers can be sent piece by piece; if so, it also has ``stream`` and ``explain``."""
    form: ClassVar[Path | None] = None
    """The script of its form on the served page; None for a form built from ``request_schema``."""
    untrusted: ClassVar[bool] = False
    """Whether ``encode`` runs a decoder that a crafted file can keep busy; if so, it also has ``encoding_seconds``, and
    a server encodes in processes that it can kill."""
    request_schema: dict[str, Any]
    """JSON Schema (2020-12) of a request, with limits and ``examples``, made by ``fields.Record``."""
    limits: Limits
    model: nn.Module
    dtype: torch.dtype
    """The type of the model's large weights, which determines tolerances."""
    device: torch.device

    @classmethod
    def encoder(cls, artifact: Exported) -> Self:
        """Make a predictor from an artifact without its weights, which can only ``encode``: no model is loaded."""
        raise NotImplementedError(f"{cls.__name__} does not define encoder(artifact)")

    @classmethod
    def load(cls, artifact: Exported, device: str | torch.device) -> Self:
        return cls.encoder(artifact).with_model(artifact.model(device))

    def with_model(self, model: nn.Module) -> Self:
        twin = copy.copy(self)
        twin.use(model)
        return twin

    def use(self, model: nn.Module) -> None:
        self.model, self.device = model, next(model.parameters()).device
        # Routers and some others may be kept in a wider type than the large weights.
        types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        self.dtype = min(types, key=lambda dtype: torch.finfo(dtype).bits)

    def encode(self, request: Request) -> Encoded:
        """Check a request and convert it to arrays; raises ``RequestError`` and nothing else."""
        raise NotImplementedError(f"{type(self).__name__} does not define encode(request)")

    def encoding_seconds(self, request: Request) -> float:
        """Return the CPU time that ``encode`` may take, from what is cheap to see, or raise ``RequestError``."""
        raise NotImplementedError(f"{type(self).__name__} does not define encoding_seconds(request)")

    def answer(self, batch: Sequence[Encoded]) -> list[Answer]:
        """Return JSON-ready answers in the batch's order: ``results`` with an id and score each, a ``text``, or others.

        If a request says ``"explain": true``, ``tokens`` names the tokens that the model read and ``blocks`` says where
        they went: [{"layer": name, "choices": number of blocks, "tokens": [[block, …] for each token]}].
        """
        raise NotImplementedError(f"{type(self).__name__} does not define answer(batch)")

    def stream(self, batch: Sequence[Encoded]) -> "Iterator[list[Piece]]":
        """Continue all requests of the batch together, step by step; ``answer`` joins the pieces.

        The iterator has the new ``ids`` of each text so far, their ``scores``, and ``drop``: see ``Continuation``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def explain(self, encoded: Encoded, new: Sequence[int]) -> Answer:
        """Return what ``"explain": true`` adds to the answer, for a request whose text is complete with these ids."""
        raise NotImplementedError(f"{type(self).__name__} does not stream")


class Piece(NamedTuple):
    """What one step adds to one text of a batch."""

    index: int  # which request of the batch
    text: str  # may be empty: a character can take several tokens
    finished: Literal["stop", "length"] | None  # "stop" at the end of the text, "length" after ``max_tokens``


@contextmanager
def recording(model: nn.Module, batch: Sequence[Encoded]) -> Iterator[Mapping[str, RecordedRouting]]:
    """Record the routing of what runs inside, if a request of the batch asks for it and the model has any."""
    wanted = any(encoded.payload["explain"] for encoded in batch)
    if wanted and next(moe_layers(model), None) is not None:
        with record_routing(model) as log:
            yield log
    else:
        yield {}


def blocks_of(log: Mapping[str, RecordedRouting], row: int, tokens: slice) -> list[dict[str, Any]]:
    """Return, for each layer with routing, the blocks that each of these tokens of one sequence went to."""
    found = []
    for name, layer in log.items():
        ids = layer.ids
        if ids is None:
            continue
        chosen = ids.view(*layer.shape, ids.shape[1])[row, tokens].tolist()
        blocks = [[block for block in token if block >= 0] for token in chosen]
        found.append({"layer": name, "choices": layer.choices, "tokens": blocks})
    return found
