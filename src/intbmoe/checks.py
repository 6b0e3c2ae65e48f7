"""Checks whose messages name the argument, its value and what is allowed. Settings are checked in ``settings.py``."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any


class UnknownNameError(KeyError, ValueError):
    """Nothing is registered under a name. As a ``KeyError`` alone would, it does not print its message in quotes."""

    __str__ = Exception.__str__


def require(condition: bool, argument: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{argument}={value!r} is not allowed: {argument} must be {allowed}")


def require_positive_int(argument: str, value: object) -> None:
    integral = isinstance(value, int) and not isinstance(value, bool)
    require(integral and value >= 1, argument, value, "an integer of at least 1")


def require_finite(argument: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number and math.isfinite(value), argument, value, "a finite number")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence for an error message: the nearest known word, or all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def some(names: Iterable[str], most: int = 8) -> str:
    """Names for a message: the first ones, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def require_state(source: str, state: Mapping[str, Any], expected: Mapping[str, Any], dtypes: bool = False) -> None:
    """Raise unless ``state`` has the keys of ``expected``, no others, and tensors of the same shapes."""
    missing, unknown = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or unknown:
        told = " and ".join(
            f"{kind} {some(map(repr, keys), 3)}"
            for kind, keys in (("lacks", missing), ("has unknown", unknown))
            if keys
        )
        raise KeyError(f"{source} state does not fit: it {told}")
    for name, wanted in expected.items():
        found = state[name]
        if found.shape != wanted.shape:
            shapes = f"{tuple(found.shape)}, expected {tuple(wanted.shape)}"
            raise ValueError(f"{source} parameter {name!r} has shape {shapes}")
        if dtypes and found.dtype != wanted.dtype:
            raise ValueError(f"{source} parameter {name!r} is {found.dtype}, expected {wanted.dtype}")
