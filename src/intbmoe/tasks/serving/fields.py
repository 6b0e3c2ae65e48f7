"""The fields of a request: each is described once, which gives both its JSON Schema and its check."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from intbmoe.checks import did_you_mean
from intbmoe.tasks.serving.requests import ABSENT, SHOWN, UNKNOWN, RequestError


class Field(Protocol):
    """What a value may be."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema."""

    def read(self, where: str, value: object) -> Any:
        """Return the value in plain Python, or raise a ``RequestError`` that calls it ``where``."""


@dataclass(frozen=True)
class Integer:
    """An integer from ``low`` to ``high``; with ``nullable``, also null."""

    low: int
    high: int
    about: str = ""
    nullable: bool = False

    def schema(self) -> dict[str, Any]:
        kind = ["integer", "null"] if self.nullable else "integer"
        return _described({"type": kind, "minimum": self.low, "maximum": self.high}, self.about)

    def read(self, where: str, value: object) -> int | None:
        if value is None and self.nullable:
            return None
        # JSON has only one kind of number: 3.0 is the integer 3.
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if not whole or isinstance(value, bool) or not self.low <= value <= self.high:
            null = ", or null" if self.nullable else ""
            raise RequestError(where, value, f"an integer from {self.low} to {self.high}{null}")
        return int(value)


@dataclass(frozen=True)
class Number:
    low: float
    high: float
    about: str = ""

    def schema(self) -> dict[str, Any]:
        return _described({"type": "number", "minimum": self.low, "maximum": self.high}, self.about)

    def read(self, where: str, value: object) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not self.low <= value <= self.high or not math.isfinite(value):
            raise RequestError(where, value, f"a number from {self.low:g} to {self.high:g}")
        return float(value)


@dataclass(frozen=True)
class Flag:
    about: str = ""

    def schema(self) -> dict[str, Any]:
        return _described({"type": "boolean"}, self.about)

    def read(self, where: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise RequestError(where, value, "true or false")
        return value


@dataclass(frozen=True)
class Choice:
    words: tuple[str, ...]
    about: str = ""

    def schema(self) -> dict[str, Any]:
        return _described({"type": "string", "enum": list(self.words)}, self.about)

    def read(self, where: str, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise RequestError(where, value, " or ".join(map(repr, self.words)))
        return value


@dataclass(frozen=True)
class Text:
    """A string of at most ``longest`` characters that UTF-8 can encode."""

    longest: int
    about: str = ""
    format: Mapping[str, str] = field(default_factory=dict)  # further schema entries, such as the encoding

    def schema(self) -> dict[str, Any]:
        return _described({"type": "string", "maxLength": self.longest, **self.format}, self.about)

    def read(self, where: str, value: object) -> str:
        if not isinstance(value, str) or len(value) > self.longest:
            raise RequestError(where, value, f"a string of at most {self.longest} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(where, value, "text: half of a surrogate pair is not a character") from None
        return value


@dataclass(frozen=True)
class Many:
    item: Field | None  # None: entries are accepted as they are, and read later
    most: int
    least: int = 0
    about: str = ""

    def schema(self) -> dict[str, Any]:
        listed = {"type": "array", "items": self.item.schema(), "minItems": self.least, "maxItems": self.most}
        return _described(listed, self.about)

    def read(self, where: str, value: object) -> list[Any]:
        if not isinstance(value, list | tuple) or not self.least <= len(value) <= self.most:
            raise RequestError(where, value, f"a list of {self.least} to {self.most} entries")
        if self.item is None:
            return list(value)
        return [self.item.read(f"{where}[{number}]", entry) for number, entry in enumerate(value)]


REQUIRED = object()  # stands for the default of a field that must be given


@dataclass(frozen=True)
class Record:
    """An object: name → the field and its default (``REQUIRED`` if it must be given)."""

    fields: Mapping[str, tuple[Field, Any]]
    about: str = ""
    examples: Sequence[Mapping[str, Any]] = ()

    def schema(self) -> dict[str, Any]:
        properties = {}
        for name, (kind, default) in self.fields.items():
            properties[name] = kind.schema()
            if default is not REQUIRED and default is not None:
                properties[name]["default"] = default
        required = [name for name, (_, default) in self.fields.items() if default is REQUIRED]
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        if self.examples:
            schema["examples"] = list(self.examples)
        return _described(schema, self.about)

    def read(self, where: str, value: object) -> dict[str, Any]:
        """Read every field; ``where`` is empty for the request itself."""
        if not isinstance(value, dict | Mapping):
            raise RequestError(where or "request", value, f"an object with {', '.join(self.fields)}")
        before = f"{where}." if where else ""
        for name in value:
            if name not in self.fields:
                raise unknown_field(f"{before}{name}", str(name), self.fields)
        found = {}
        for name, (kind, default) in self.fields.items():
            if name in value:
                found[name] = kind.read(before + name, value[name])
            elif default is REQUIRED:
                raise RequestError(before + name, ABSENT)
            else:
                found[name] = default
        return found


def unknown_field(where: str, name: str, known: Collection[str]) -> RequestError:
    near = did_you_mean(name[:SHOWN], known)  # comparing a name of megabytes would take seconds
    return RequestError(where, UNKNOWN, near)


def _described(schema: dict[str, Any], about: str) -> dict[str, Any]:
    return {**schema, "description": about} if about else schema


EXPLAIN = (Flag("Whether the answer says which blocks each token took in each layer."), False)


def top_n_field(most: int, default: int) -> tuple[Field, int]:
    return Integer(1, most, "How many to answer with, the best first."), min(default, most)


# Requests with a history share these: items of a user or journeys, from old to new, to predict what comes next.
HISTORY = 1000  # the most entries of a history
TOP_N, MOST = 10, 100  # results by default, and at most
HISTORY_FORM = Path(__file__).with_name("history.js")


def recommend_fields(most: int) -> dict[str, tuple[Field, Any]]:
    """Return the fields besides the history itself; there are at most ``most`` results."""
    visited = Choice(("allow", "exclude"), "Whether what is in the history may be recommended again.")
    return {"top_n": top_n_field(most, TOP_N), "visited": (visited, "allow"), "explain": EXPLAIN}
