"""One shard: its rows out of all chunks, sorted by user and time, joined into sessions, with the users' profiles.

The table of actions has a row for each thing a user does with a place: looks at it, asks for a route, sets out. What
follows within minutes for the same place is one session, else the next row would nearly always repeat the last one.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from intbmoe.tasks.travel.spill import Chunk, recode
from intbmoe.tasks.travel.store import FIELDS

SESSION_GAP = 5 * 60 * 1000
"""Milliseconds between rows of one session, at most."""


def make_shard(
    number: int, actions: Sequence[Chunk], profiles: Sequence[Chunk], codes: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The arrays of shard ``number``, and the users who have more than one profile (the first one counts)."""
    rows = join_sessions(read_shard(number, actions, codes, by=("user", "time")))
    user, first = np.unique(rows["user"], return_index=True)
    profile, repeated = _find_profiles(user, read_shard(number, profiles, codes, by=("user",)))
    arrays = {
        "user": user,
        "offsets": np.append(first, len(rows["user"])),
        "profile": profile,
        "time": rows["time"],
        "fields": np.stack([rows[name] for name in FIELDS]),
    }
    return arrays, repeated


def read_shard(
    number: int, chunks: Sequence[Chunk], codes: Mapping[str, np.ndarray], by: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """The rows of a shard by column, with codes; sorted, and in the order of the table where ``by`` does not decide."""
    ends = np.cumsum([chunk.starts[number + 1] - chunk.starts[number] for chunk in chunks])
    rows = np.empty(ends[-1], chunks[0].layout.dtype)
    for chunk, end in zip(chunks, ends, strict=True):
        part = chunk.shard(number)
        rows[end - len(part) : end] = part
    order = np.lexsort([rows[name] for name in reversed(by)])
    return {name: _column(rows[name][order], codes.get(name)) for name in rows.dtype.names}


def _column(values: np.ndarray, known: np.ndarray | None) -> np.ndarray:
    return values if known is None else recode(values, known)


def join_sessions(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows sorted by user and time, with those of one session made one.

    A row belongs to the session of the one before it if user and place are the same, neither has a via point, and it
    is at most ``SESSION_GAP`` later. A session has the scenario of its first row, which is what was known before, and
    of what came after the last: the action of its last row and the last travel mode that was given.
    """
    user, time, place, via = (rows[name] for name in ("user", "time", "place", "via"))
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


def _find_profiles(user: np.ndarray, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(U, 6) codes of these users, 0 where there is no profile, and who has two; ``rows`` are sorted by user."""
    owner, first = np.unique(rows["user"], return_index=True)
    features = np.stack([column[first] for name, column in rows.items() if name != "user"], axis=1)
    features = np.concatenate([features, np.zeros((1, features.shape[1]), np.int32)])
    found = np.searchsorted(owner, user)
    found[np.append(owner, 0)[found] != user] = len(owner)
    return features[found], np.delete(rows["user"], first)
