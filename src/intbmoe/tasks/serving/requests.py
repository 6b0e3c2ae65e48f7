"""A request in transit: what is wrong with it, what it may ask for, and how it is sent between processes.

``to_wire`` and ``from_wire`` carry encoded requests between processes as msgpack: numbers, strings and arrays, but
nothing that could hold code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from intbmoe.foreign import import_extra

Request = Mapping[str, Any]
Answer = dict[str, Any]
SHOWN = 60  # characters of a refused value that the message repeats
ABSENT, UNKNOWN = object(), object()  # stand for the value of a missing field, and of one that does not exist


class RequestError(ValueError):
    """A request that cannot be answered as it is; ``field`` says where, such as ``history[3].place``."""

    def __init__(self, field: str, value: object, allowed: str = "") -> None:
        """``allowed`` completes the sentence "… must be"; for the value ``UNKNOWN`` it is what the client may mean."""
        # Short, and without what UTF-8 cannot encode: a client may name a field anything.
        self.field = field[:SHOWN].encode("utf-8", "backslashreplace").decode()
        if value is ABSENT:
            message = f"the field {self.field} is missing"
        elif value is UNKNOWN:
            message = f"there is no field {self.field!r}: {allowed}"
        else:
            message = f"{self.field}={shown(value)} is not allowed: {self.field} must be {allowed}"
        super().__init__(message)


def shown(value: object) -> str:
    """Return ``value`` for a message: short and printable, whatever it is."""
    if isinstance(value, dict | list | tuple):
        kind = "object" if isinstance(value, dict) else "list"
        return f"<{kind} of {len(value)}>"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"<integer of {value.bit_length()} bits>"
    if isinstance(value, str | bytes) and len(value) > SHOWN:
        return f"{value[: SHOWN - 10]!a}… ({len(value)} in total)"
    return ascii(value)


@dataclass(frozen=True)
class Encoded:
    tokens: int  # its cost in a batch's token budget
    payload: Mapping[str, Any]  # flat: name → array, number, string, bytes, bool or None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a request may ask for; None if it has no such field."""

    body_bytes: int  # bytes of a request's JSON
    top_n: int | None = None  # entries of a ranking
    history: int | None = None  # items or sessions that may be sent; the model uses the last ones
    prompt_tokens: int | None = None
    max_tokens: int | None = None  # new tokens
    image_bytes: int | None = None  # bytes of an image file, before base64
    image_pixels: int | None = None  # width times height of an image as it is sent


_ARRAY = "array"
WIRE_TYPES = frozenset({"bool", "uint8", "int32", "int64", "float32", "float64"})


def to_wire(encoded: Encoded) -> bytes:
    """Pack an encoded request as msgpack; arrays become [type, shape, bytes]."""
    return _msgpack().packb([encoded.tokens, dict(encoded.payload)], default=_pack_array)


def from_wire(content: bytes) -> Encoded:
    """Unpack what ``to_wire`` wrote; arrays are views of ``content`` and cannot be written to."""
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
        raise ValueError(f"received an array of {dtype!r}: expected {', '.join(sorted(WIRE_TYPES))}")
    return np.frombuffer(content, dtype=dtype).reshape(shape)


def _msgpack() -> ModuleType:
    return import_extra("msgpack", "sending requests", "serve")


def spread_evenly(total: int, count: int) -> list[int]:
    """Return numbers below ``total``, evenly spread from first to last: the examples for golden requests."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int)).tolist()
