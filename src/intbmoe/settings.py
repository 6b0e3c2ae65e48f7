"""Settings to plain data and back: dataclasses ↔ dicts of strings, numbers, lists, as YAML and JSON hold them.

``to_plain`` and ``from_plain`` are exact inverses. Coming back every key and type is checked, and an error says where:
``train.epoch: no such setting: did you mean 'epochs'?``.
"""

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from intbmoe.checks import did_you_mean
from intbmoe.registry import find_method

SCALARS = (str, bool, int, float, type(None))


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
    if isinstance(value, SCALARS):
        return value
    raise TypeError(f"{value!r} is a {type(value).__name__}, which a recipe cannot hold")


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``, a type or an annotation; ``where`` is its place for error messages."""
    if is_dataclass(kind):
        return _settings(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _first_fit(kind, value, where)
    if origin is Literal:
        if value in arguments:
            return value
        raise _wrong(value, where, f"one of {', '.join(map(repr, arguments))}")
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is dict:
        if isinstance(value, Mapping):
            return {str(key): from_plain(arguments[1], entry, f"{where}.{key}") for key, entry in value.items()}
        raise _wrong(value, where, "a mapping")
    return _scalar(kind, value, where)


def _settings(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(value, where, f"a mapping with the settings of {kind.__name__}")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.init}
    for key in value:
        if key not in known:
            raise ValueError(f"{_join(where, key)}: no such setting: {did_you_mean(str(key), known)}")
    for name, f in known.items():
        if name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{_join(where, name)} is missing")
    converted = {key: from_plain(hints[key], entry, _join(where, key)) for key, entry in value.items()}
    try:
        return kind(**converted)
    except ValueError as error:
        # The settings' own checks name the argument, not always the room it stands in.
        text = str(error)
        raise ValueError(text if not where or text.startswith(f"{where}.") else f"{where}: {text}") from error


def _first_fit(kind: Any, value: Any, where: str) -> Any:
    """None only for None, otherwise the first member that takes the value."""
    members = get_args(kind)
    if value is None and type(None) in members:
        return None
    last = None
    for member in members:
        if member is type(None):
            continue
        try:
            return from_plain(member, value, where)
        except (ValueError, TypeError) as error:
            last = error
    names = " or ".join("None" if member is type(None) else _name(member) for member in members)
    raise _wrong(value, where, names) from last


def _tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(value, where, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise _wrong(value, where, f"a list of {len(arguments)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(from_plain(kind, entry, f"{where}[{index}]") for index, (kind, entry) in enumerate(pairs))


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float:
        # YAML reads 1e-3, without a point, as a string; what a person means is a number.
        if isinstance(value, str) and "e" in value.lower():
            try:
                return float(value)
            except ValueError:
                raise _wrong(value, where, "a number") from None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise _wrong(value, where, "a number")
    if kind is int and isinstance(value, bool):
        raise _wrong(value, where, "an integer")
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if not isinstance(value, kind):
        raise _wrong(value, where, _name(kind))
    return value


def _name(kind: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    return names.get(kind, "a list" if get_origin(kind) is tuple else str(kind))


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _wrong(value: Any, where: str, allowed: str) -> ValueError:
    return ValueError(f"{where}={value!r} is not allowed: {where} must be {allowed}")


def option_types(method: str) -> dict[str, Any]:
    """What ``moe.options`` may set for a method, with types: the fields of its Config, all but the width ``dim``."""
    config = find_method(method).layer.Config
    hints = get_type_hints(config)
    kinds = {f.name: hints[f.name] for f in fields(config) if f.init and f.name != "dim"}
    # Methods whose blocks have one inner width do not annotate it anew.
    return {name: int if kind is Any else kind for name, kind in kinds.items()}


def require_options(method: str, names: Iterable[str]) -> None:
    """Raise unless the method has options of these names."""
    known = option_types(method)
    for name in names:
        if name not in known:
            raise ValueError(f"moe.options.{name}: {method} has no such option: {did_you_mean(name, known)}")


def check_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with names, types and values checked against the method's Config, as plain data."""
    require_options(method, options)
    known = option_types(method)
    typed = {name: from_plain(known[name], value, f"moe.options.{name}") for name, value in options.items()}
    try:
        find_method(method).config(**{"dim": 8, "hidden": 8, **typed})  # sizes that any option goes with
    except ValueError as error:
        raise ValueError(f"moe.options: {error}") from error
    return {name: to_plain(value) for name, value in typed.items()}
