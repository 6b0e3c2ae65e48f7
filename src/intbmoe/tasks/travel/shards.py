"""One shard: its rows out of all chunks, sorted by user and time, joined into sessions, with the users' profiles.

The table of actions has a row for each thing a user does with a place: looks at it, asks for a route, sets out. What
follows within minutes for the same place is one session, else the next row would nearly always repeat the last one.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.travel.spill import CODED, parquet
from intbmoe.tasks.travel.store import FIELDS
from intbmoe.tasks.travel.tables import USER_ACTION, USER_PROFILE

SESSION_GAP = 5 * 60 * 1000
"""Milliseconds between rows of one session, at most."""


def make_shard(
    connection: Any, number: int, actions: Sequence[Path], profiles: Sequence[Path]
) -> tuple[dict[str, np.ndarray], list[tuple[int, int, int]]]:
    """The arrays of shard ``number``, and (user, first row, another row) of those with more than one profile."""

    def read(chunks: Sequence[Path], plain: str, coded: Iterable[str], order: str) -> dict[str, np.ndarray]:
        source = with_codes(parquet(chunks), plain, {name: name for name in coded})
        return connection.execute(f"{source} WHERE shard = {number} ORDER BY {order}, number").fetchnumpy()

    rows = join_sessions(read(actions, "user_id, time, place, via", CODED[USER_ACTION.name], "user_id, time"))
    user, first = np.unique(rows["user_id"], return_index=True)
    profile, repeated = _find_profiles(user, read(profiles, "user_id, number", CODED[USER_PROFILE.name], "user_id"))
    arrays = {
        "user": user,
        "offsets": np.append(first, len(rows["user_id"])),
        "profile": profile,
        "time": rows["time"],
        "fields": np.stack([rows[name] for name in FIELDS]),
    }
    return arrays, repeated


def with_codes(source: str, plain: str, coded: Mapping[str, str]) -> str:
    """SQL for the columns ``plain`` and the codes of others (name → column), 0 for an empty field."""
    codes = ", ".join(f"coalesce(code_{name}.code, 0) AS {name}" for name in coded)
    joins = " ".join(f"LEFT JOIN code_{name} ON code_{name}.value = rows.{column}" for name, column in coded.items())
    return f"SELECT {plain}, {codes} FROM {source} AS rows {joins}"


def join_sessions(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows sorted by user and time, with those of one session made one.

    A row belongs to the session of the one before it if user and place are the same, neither has a via point, and it
    is at most ``SESSION_GAP`` later. A session has the scenario of its first row, which is what was known before, and
    of what came after the last: the action of its last row and the last travel mode that was given.
    """
    user, time, place, via = (rows[name] for name in ("user_id", "time", "place", "via"))
    number = len(user)
    joins = (user[1:] == user[:-1]) & (place[1:] == place[:-1]) & (place[1:] >= 0)
    joins &= (via[1:] < 0) & (via[:-1] < 0) & (np.diff(time) <= SESSION_GAP)
    first = np.flatnonzero(np.append(True, ~joins)[:number])
    sessions = {name: column[first] for name, column in rows.items()}
    if number:
        sessions["action"] = rows["action"][np.append(first[1:], number) - 1]
        given = np.maximum.reduceat(np.where(rows["mode"] > 0, np.arange(number), -1), first)
        sessions["mode"] = np.where(given < 0, 0, rows["mode"][given])
    return sessions


def _find_profiles(user: np.ndarray, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """(U, 6) codes of these users, 0 where there is no profile, and who has two; ``rows`` are sorted by user."""
    owner, first, group = np.unique(rows["user_id"], return_index=True, return_inverse=True)
    features = np.stack([rows[name] for name in CODED[USER_PROFILE.name]], axis=1)[first]
    features = np.concatenate([features, np.zeros((1, features.shape[1]), np.int32)])
    found = np.searchsorted(owner, user)
    found[np.append(owner, 0)[found] != user] = len(owner)
    number = rows["number"]
    again = np.delete(np.arange(len(number)), first)
    return features[found], list(zip(owner[group[again]], number[first][group[again]], number[again], strict=True))
