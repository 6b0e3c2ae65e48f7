"""Settings whose annotations say which values are allowed; values from Python and from YAML are checked and converted.

    @dataclass(frozen=True)
    class RouterSettings(Checked):
        experts: PositiveInt = 8
        top_k: Annotated[PositiveInt, AtMost("experts")] = 2
        dropout: Share = 0.1

    RouterSettings(top_k=9)    # ValueError: top_k=9 is not allowed: top_k must be at most experts (8)

``from_plain`` makes settings from the dicts, lists, strings and numbers that YAML and JSON hold, and ``to_plain`` is
its exact inverse. Errors say where the problem is: ``train.epoch: no such setting: did you mean 'epochs'?``.
"""

import math
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from intbmoe.checks import did_you_mean, require


@dataclass(frozen=True)
class MustBe:
    """In an annotation: what a value must be, in words and as a test. Errors show the last one if there are several."""

    words: str
    test: Callable[[Any], bool] = lambda value: True


@dataclass(frozen=True)
class AtMost:
    """In an annotation: the value may not exceed the value of another field."""

    field: str


PositiveInt = Annotated[int, MustBe("an integer of at least 1", lambda value: value >= 1)]
NonNegativeInt = Annotated[int, MustBe("an integer of at least 0", lambda value: value >= 0)]
Positive = Annotated[float, MustBe("a positive finite number", lambda value: value > 0)]
NonNegative = Annotated[float, MustBe("a finite number of at least 0", lambda value: value >= 0)]
Probability = Annotated[float, MustBe("a number in [0, 1]", lambda value: 0 <= value <= 1)]
Share = Annotated[float, MustBe("a number in [0, 1)", lambda value: 0 <= value < 1)]

_NAMES = {int: "an integer", float: "a finite number", str: "a string", bool: "True or False", Path: "a path"}


@dataclass(frozen=True)
class Checked:
    """Base of frozen dataclasses that check and convert their fields by the annotations when an object is made."""

    def __post_init__(self) -> None:
        hints = field_types(type(self))
        for name, kind in hints.items():
            object.__setattr__(self, name, from_plain(kind, getattr(self, name), name))
        for name, kind in hints.items():
            value = getattr(self, name)
            for limit in getattr(kind, "__metadata__", ()):
                if isinstance(limit, AtMost) and value is not None:
                    most = getattr(self, limit.field)
                    require(value <= most, name, value, f"at most {limit.field} ({most})")


@cache
def field_types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind) if f.init}


def to_plain(value: Any) -> Any:
    """A dataclass as a dict, a tuple as a list, a path as a string; scalars stay."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str | int | float | None):
        return value
    raise TypeError(f"{value!r} is a {type(value).__name__}, which a recipe cannot hold")


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """Convert ``value`` to ``kind``, a type or an annotation; ``where`` names the setting in error messages."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return value if isinstance(value, kind) else _settings(kind, value, where)
    if kind is Any:
        return value
    if origin is Annotated:
        return _annotated(kind, value, where)
    if origin in (Union, types.UnionType):
        return _first_fit(kind, value, where)
    if origin is tuple:
        return _tuple(kind, value, where)
    if origin is Literal and value in arguments:
        return value
    if origin is dict and isinstance(value, Mapping):
        return {str(key): from_plain(arguments[1], entry, f"{where}.{key}") for key, entry in value.items()}
    if origin is None:
        return _scalar(kind, value, where)
    raise _wrong(value, where, kind)


def _settings(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(value, where, kind)
    hints, inside = field_types(kind), f"{where}." if where else ""
    for key in value:
        if key not in hints:
            raise ValueError(f"{inside}{key}: no such setting: {did_you_mean(str(key), hints)}")
    for f in fields(kind):
        if f.name in hints and f.name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{inside}{f.name} is missing")
    converted = {key: from_plain(hints[key], entry, f"{inside}{key}") for key, entry in value.items()}
    try:
        return kind(**converted)
    except ValueError as error:  # fields that contradict each other: the error names the field, but not its path
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def _annotated(kind: Any, value: Any, where: str) -> Any:
    base, *metadata = get_args(kind)
    rules = [rule for rule in metadata if isinstance(rule, MustBe)]
    if not rules:
        return from_plain(base, value, where)
    try:
        converted = from_plain(base, value, where)
    except ValueError as error:
        raise _wrong(value, where, kind) from error
    if not all(rule.test(converted) for rule in rules):
        raise _wrong(value, where, kind)
    return converted


def _first_fit(kind: Any, value: Any, where: str) -> Any:
    if value is None and type(None) in get_args(kind):
        return None
    for member in get_args(kind):
        try:
            return from_plain(member, value, where)
        except ValueError:
            continue
    raise _wrong(value, where, kind)


def _tuple(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    kinds = get_args(kind)
    if isinstance(value, list | tuple):
        if kinds[-1:] == (Ellipsis,):
            kinds = kinds[:1] * len(value)
        if len(kinds) == len(value):
            return tuple(from_plain(kinds[i], entry, f"{where}[{i}]") for i, entry in enumerate(value))
    raise _wrong(value, where, kind)


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind in (str, Path) and isinstance(value, str | Path):
        return kind(value)
    if kind is float:
        # YAML reads 1e-3, which has no decimal point, as a string; people mean a number.
        written = isinstance(value, str) and "e" in value.lower()
        with suppress(ValueError, OverflowError):
            if written or (isinstance(value, int | float) and not isinstance(value, bool)):
                number = float(value)
                if math.isfinite(number):
                    return number
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _wrong(value, where, kind)


def _words(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        rules = [rule.words for rule in arguments[1:] if isinstance(rule, MustBe)]
        return rules[-1] if rules else _words(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        named = [repr(argument) for argument in arguments]
        return " or ".join(named) if len(named) <= 2 else f"one of {', '.join(named)}"
    if origin is tuple:
        return "a list" if arguments[-1:] == (Ellipsis,) else f"a list of {len(arguments)}"
    if is_dataclass(kind):
        return f"a mapping with the settings of {kind.__name__}"
    return "a mapping" if origin is dict else "None" if kind is type(None) else _NAMES.get(kind, str(kind))


def _wrong(value: Any, where: str, kind: Any) -> ValueError:
    return ValueError(f"{where}={value!r} is not allowed: {where} must be {_words(kind)}")
