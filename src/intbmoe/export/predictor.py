"""From a request to an answer: what the server, the command line and golden requests ask of an artifact.

    encode    JSON → arrays, or ``RequestError`` that names the field; needs the catalogue or the vocabulary, no weights
    answer    a batch of encoded requests → JSON, in one padded call of the model

An answer is a function of its own request alone: padding is masked, and neither batch mates nor their order or
lengths change it by more than rounding. ``to_wire`` and ``from_wire`` carry encoded requests between processes as
msgpack: numbers, strings and arrays, nothing that could hold code.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from intbmoe.export.artifact import Artifact

Action = Literal["classify", "recommend", "generate"]
Request = Mapping[str, Any]
Answer = dict[str, Any]
SHOWN = 60
"""Characters of a refused value that its message repeats."""


ABSENT = object()
"""In place of the value of a field that is not there."""


class RequestError(ValueError):
    """A request that cannot be answered as it is. ``field`` says where, such as ``history[3].place``."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        """``allowed`` completes the sentence "… must be"; ``value`` may be ``ABSENT``."""
        self.field = _printable(field)
        found = " is missing" if value is ABSENT else f"={shown(value)} is not allowed"
        super().__init__(f"{self.field}{found}: {self.field} must be {allowed}")


def shown(value: object) -> str:
    """``value`` for a message: short and printable, whatever it is."""
    if isinstance(value, dict | list | tuple):
        kind = "object" if isinstance(value, dict) else "list"
        return f"<{kind} of {len(value)}>"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"<integer of {value.bit_length()} bits>"
    if isinstance(value, str | bytes) and len(value) > SHOWN:
        return f"{value[: SHOWN - 10]!a}… ({len(value)} in all)"
    return ascii(value)


def _printable(text: str) -> str:
    """Short, and free of what UTF-8 cannot carry: a client may name a field anything."""
    return text[:SHOWN].encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Encoded:
    """A request in arrays."""

    tokens: int
    """What it costs in a batch's token budget."""
    payload: Mapping[str, Any]
    """Flat: name → array, number, string, bytes, bool or None."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may ask for at most; None where it has no such field."""

    body_bytes: int
    """Bytes of a request's JSON."""
    top_n: int | None = None
    """Entries of a ranking."""
    history: int | None = None
    """Items or sessions that may be sent; the model looks at the last ones."""
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    """New tokens."""
    image_bytes: int | None = None
    """Bytes of an image file, before base64."""
    image_pixels: int | None = None
    """Width times height of an image as it comes."""


class Encoder(Protocol):
    """The half of a predictor that needs no weights."""

    action: Action
    request_schema: dict[str, Any]
    """JSON Schema (2020-12) of a request, with limits and ``examples``."""
    limits: Limits

    def encode(self, request: Request) -> Encoded:
        """Check a request and turn it into arrays; raises ``RequestError`` and nothing else."""
        ...


class Predictor(Encoder, Protocol):
    """Answers requests with an artifact's model."""

    dtype: "torch.dtype"
    """The model's type: what tolerances follow from."""

    def answer(self, batch: Sequence[Encoded]) -> list[Answer]:
        """JSON-ready answers in the order of the batch.

        Where a request says ``"explain": true``, ``tokens`` names the tokens the model read and ``blocks`` says where
        they went: [{"layer": name, "choices": how many blocks there are, "tokens": [[block, …] for each token]}].
        """
        ...


class Piece(NamedTuple):
    """What one step of a generation adds to one request of a batch."""

    index: int
    """Which request of the batch."""
    text: str
    """May be empty: a character can take several tokens."""
    finished: Literal["stop", "length"] | None
    """None while it goes on; "stop" after the end of the text, "length" after ``max_tokens``."""


class Generation(Protocol):
    """A batch being continued: each step yields the pieces of all requests that are still going on."""

    ids: Sequence[Sequence[int]]
    """The tokens of each request so far."""
    scores: Sequence[float]
    """The log-probability of each."""

    def __iter__(self) -> Iterator[list[Piece]]: ...

    def __next__(self) -> list[Piece]: ...

    def drop(self, index: int) -> None:
        """Stop continuing this request, because nobody waits for it; the others are not affected."""
        ...


class StreamingPredictor(Predictor, Protocol):
    """A predictor whose answers come piece by piece; its ``answer`` is the pieces joined."""

    def stream(self, batch: Sequence[Encoded]) -> Generation:
        """Continue all requests of the batch together, with a key-value cache."""
        ...

    def explain(self, encoded: Encoded, new: Sequence[int]) -> Answer:
        """What ``"explain": true`` adds to the answer, for a request whose text is complete with these ids."""
        ...


def make_encoder(artifact: "Artifact") -> Encoder:
    """The encoding half alone, for a process that has no model."""
    return _predictor_type(artifact.task).encoder(artifact)


def make_predictor(artifact: "Artifact", device: "str | torch.device" = "cpu") -> Predictor:
    """The artifact's model on ``device``, ready to answer."""
    return _predictor_type(artifact.task).load(artifact, device)


def _predictor_type(task: str) -> Any:
    if task == "vision":
        from intbmoe.export.predictors.classify import ClassifyPredictor

        return ClassifyPredictor
    if task == "sequences":
        from intbmoe.export.predictors.recommend_items import ItemPredictor

        return ItemPredictor
    if task == "travel":
        from intbmoe.export.predictors.recommend_places import PlacePredictor

        return PlacePredictor
    if task == "language":
        from intbmoe.export.predictors.generate import GeneratePredictor

        return GeneratePredictor
    raise ValueError(
        f"an artifact of the task {task!r} cannot be asked anything: known are vision, sequences, travel, language"
    )


_ARRAY = "array"
WIRE_TYPES = frozenset({"bool", "uint8", "int32", "int64", "float32", "float64"})


def to_wire(encoded: Encoded) -> bytes:
    """An encoded request as msgpack; arrays as [type, shape, bytes]."""
    return _msgpack().packb([encoded.tokens, dict(encoded.payload)], default=_pack_array)


def from_wire(content: bytes) -> Encoded:
    """What ``to_wire`` wrote; arrays are views of ``content`` and cannot be written to."""
    tokens, payload = _msgpack().unpackb(content, strict_map_key=True, object_hook=_unpack_array)
    return Encoded(tokens, payload)


def _pack_array(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype.name in WIRE_TYPES:
        return {_ARRAY: [value.dtype.name, list(value.shape), value.tobytes()]}
    if isinstance(value, np.generic) and value.dtype.name in WIRE_TYPES:
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent: arrays of {', '.join(sorted(WIRE_TYPES))} can")


def _unpack_array(value: dict[str, Any]) -> Any:
    if list(value) != [_ARRAY]:
        return value
    dtype, shape, content = value[_ARRAY]
    if dtype not in WIRE_TYPES:
        raise ValueError(f"an array of {dtype!r} came over the wire: expected {', '.join(sorted(WIRE_TYPES))}")
    return np.frombuffer(content, dtype=dtype).reshape(shape)


def _msgpack() -> Any:
    try:
        import msgpack
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "sending requests between processes needs msgpack: pip install 'intbmoe[serve]'"
        ) from error
    return msgpack
