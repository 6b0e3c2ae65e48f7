"""The fields of a journey in a request, and their conversion to the codes of ``tasks/travel/examples.py``."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from intbmoe.models.travel import PROFILE_TOKENS, SCENARIO
from intbmoe.tasks.serving.fields import Integer, unknown_field
from intbmoe.tasks.serving.requests import RequestError
from intbmoe.tasks.travel.data import HOUR
from intbmoe.tasks.travel.examples import time_codes

MISSING = np.iinfo(np.int64).min
LATEST = 4_102_444_800_000
TIME = Integer(0, LATEST, "Milliseconds since 1970, UTC.")
SIZES = {"cell": "cells", "region": "regions", "weather": "weathers", "mode": "modes", "action": "actions"}
LARGEST_TABLE = 2**17  # values up to which a table gives their codes; a search is slower and takes less memory
ABOUT = {
    "place": "Where the user went: the id of a place.",
    "via": "A place on the way there.",
    "cell": "The part of the map where the user was.",
    "region": "The administrative region where the user was.",
    "weather": "The weather.",
    "mode": "How the user travelled.",
    "action": "What the user did in the app.",
}


class Coded:
    """A field whose values have codes: that of ``values[i]`` is i + 1, and 0 means unknown."""

    def __init__(self, values: np.ndarray, about: str = "") -> None:
        """``values`` (n,) int64 are in ascending order."""
        self.values = values
        low, high = (int(values[0]), int(values[-1])) if len(values) else (0, 0)
        # Not every value between the smallest and the largest need exist.
        self.field = Integer(low, high, f"{about} null if it is not known.".strip(), nullable=True)
        self._table: dict[object, int] | None = None
        if len(values) <= LARGEST_TABLE:
            self._table = {value: code for code, value in enumerate(values.tolist(), start=1)} | {None: 0}

    def read(self, values: Sequence[object], where: Callable[[int], str]) -> list[int]:
        """Convert values of a request to codes; raise for the first that is wrong, under the name from ``where``."""
        return self._read_fast(values) or self._read_each(values, where)

    def _read_fast(self, values: Sequence[object]) -> list[int] | None:
        """Return None if something may be wrong, or if there is nothing."""
        kinds = set(map(type, values))
        if not kinds <= {int, type(None)}:
            return None
        if self._table is not None:
            found = list(map(self._table.get, values))
            return None if None in found else found
        if any(value is not None and not self.field.low <= value <= self.field.high for value in values):
            return None
        found = self._find(values)
        return None if -1 in found else found

    def _read_each(self, values: Sequence[object], where: Callable[[int], str]) -> list[int]:
        found = self._find([self.field.read(where(number), value) for number, value in enumerate(values)])
        if -1 in found:
            number = found.index(-1)
            allowed = "one that the catalogue knows, or null if it is not known"
            raise RequestError(where(number), values[number], allowed)
        return found

    def _find(self, values: Sequence[int | None]) -> list[int]:
        """Return codes, −1 for values that do not exist."""
        if not len(self.values):
            return [0 if value is None else -1 for value in values]
        column = np.array([MISSING if value is None else value for value in values], np.int64)
        at = np.minimum(np.searchsorted(self.values, column), len(self.values) - 1)
        return np.where(self.values[at] == column, at + 1, np.where(column == MISSING, 0, -1)).tolist()


@dataclass(frozen=True)
class JourneyFields:
    coded: Mapping[str, Coded]  # place, via (the same places), cell, region, weather, mode, action, profile_1 to _6
    clock: int  # milliseconds by which the users' clocks are ahead of UTC

    @staticmethod
    def read(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "JourneyFields":
        """Read an artifact's catalogue, as ``TravelTask.catalogue`` makes it."""
        sizes = {name: about["sizes"][many] for name, many in SIZES.items()}
        sizes |= {f"profile_{number}": size for number, size in enumerate(about["sizes"]["profile"], start=1)}
        coded = {}
        for name, size in sizes.items():
            original = tensors.get(f"values.{name}")
            values = np.arange(1, size) if original is None else original.numpy().astype(np.int64)
            coded[name] = Coded(values, ABOUT.get(name, ""))
        ids = tensors["ids"].numpy()
        places = {name: Coded(ids, ABOUT[name]) for name in ("place", "via")}
        return JourneyFields(coded | places, round(about["utc_offset"] * HOUR))

    @property
    def place(self) -> Coded:
        return self.coded["place"]

    @property
    def profile(self) -> tuple[str, ...]:
        return tuple(f"profile_{number}" for number in range(1, PROFILE_TOKENS + 1))

    def field(self, name: str) -> Integer:
        """Return what a request may contain there."""
        return TIME if name == "time" else self.coded[name].field

    def value(self, name: str, code: int) -> int:
        """Return the value in a request for a code above 0."""
        return int(self.coded[name].values[code - 1])

    def read_times(self, history: Sequence[Mapping[str, object]], now: int) -> np.ndarray:
        """Return (N + 1,) the times of the sessions and of ``now``; raise unless they go from old to new."""
        times = [session.get("time") for session in history]
        if set(map(type, times)) != {int} or min(times) < TIME.low or max(times) > TIME.high:
            times = [TIME.read(f"history[{number}].time", time) for number, time in enumerate(times)]
        times = np.array([*times, now], np.int64)
        back = np.flatnonzero(times[1:] < times[:-1])
        if len(back):
            row, before = int(back[0]) + 1, int(times[back[0]])
            name = f"history[{row}].time" if row < len(history) else "now.time"
            raise RequestError(name, int(times[row]), f"at least {before}, the time of the session before it")
        return times

    def read_codes(self, name: str, history: Sequence[Mapping[str, object]], now: int | None = None) -> list[int]:
        sessions = len(history)
        values = [*(session.get(name) for session in history), now]
        return self.coded[name].read(values, lambda at: f"history[{at}].{name}" if at < sessions else f"now.{name}")

    def read_profile(self, profile: Mapping[str, int | None]) -> np.ndarray:
        """Return (6,) codes."""
        names = self.profile
        found = [self.coded[name].read([profile.get(name)], lambda _, name=name: f"profile.{name}") for name in names]
        return np.array(found, np.int32).ravel()

    def example(self, top_n: int) -> dict[str, Any]:
        start = 1_704_096_000_000
        there = {name: int(self.coded[name].values[0]) for name in ("cell", "weather") if len(self.coded[name].values)}
        went = [int(place) for place in self.place.values[:2]]
        history = [{"time": start + day * 24 * HOUR, **there, "place": place} for day, place in enumerate(went)]
        now = {"time": start + len(went) * 24 * HOUR, **there}
        return {"history": history, "now": now, "top_n": top_n, "visited": "allow"}


def scenario_codes(time: np.ndarray, clock: int) -> np.ndarray:
    """Return (N, 6) codes of consecutive sessions: hour, weekday and gap; the others are still 0."""
    codes = np.zeros((len(time), len(SCENARIO)), np.int32)
    before = np.append(-1, time[:-1])
    for name, column in zip(("hour", "weekday", "gap"), time_codes(time, before, clock), strict=True):
        codes[:, SCENARIO.index(name)] = column
    return codes


def check_sessions(history: Sequence[object], names: Collection[str]) -> None:
    for number, session in enumerate(history):
        if not isinstance(session, dict | Mapping):  # checking dict first is faster
            raise RequestError(f"history[{number}]", session, f"an object with {', '.join(names)}")
        if not session.keys() <= names:
            name = next(name for name in session if name not in names)
            raise unknown_field(f"history[{number}].{name}", str(name), names)
