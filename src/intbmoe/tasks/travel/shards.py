"""One shard: its rows from all chunks, sorted by user and time, joined into sessions, with the users' profiles.

The table of actions has a row for each thing a user does with a place: looks at it, asks for a route, sets out. Rows
for the same place within minutes are one session; otherwise the next row would nearly always repeat the last one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from intbmoe.tasks.travel.data import find_departures
from intbmoe.tasks.travel.rows import MISSING
from intbmoe.tasks.travel.spill import CODED, PLAIN
from intbmoe.tasks.travel.store import FIELDS
from intbmoe.tasks.travel.tables import USER_ACTION, USER_PROFILE

SESSION_GAP = 5 * 60 * 1000
"""The most milliseconds between rows of one session."""
NAVIGATION = 3
"""The action_type of setting out, according to the released code."""


def make_shard(
    number: int, actions: Sequence[Path], profiles: Sequence[Path], codes: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[tuple[int, int, int]]]:
    """Return the arrays of shard ``number``, and (user, first row, another row) of users with several profiles."""
    user, time, place, via, coded = _read(number, USER_ACTION.name, actions, codes)
    rows = {"user": user, "time": time, "place": place.astype(np.int32), "via": via.astype(np.int32), **coded}
    navigation = int(np.searchsorted(codes["action"], NAVIGATION)) + 1 if NAVIGATION in codes["action"] else -1
    rows = join_sessions(rows, navigation)
    user, first = np.unique(rows["user"], return_index=True)
    profile, repeated = _find_profiles(user, *_read(number, USER_PROFILE.name, profiles, codes))
    arrays = {
        "user": user,
        "offsets": np.append(first, len(rows["user"])),
        "profile": profile,
        "time": rows["time"],
        "depart": rows["depart"],
        "fields": np.stack([rows[name] for name in FIELDS]),
    }
    return arrays, repeated


def _read(number: int, table: str, chunks: Sequence[Path], codes: Mapping[str, np.ndarray]) -> list:
    """Return the plain columns of a shard, and its fields as codes; sorted, ties in the order of the table."""
    parts = []
    for chunk in chunks:
        start, end = np.load(chunk / "starts.npy", mmap_mode="r")[number : number + 2]
        parts.append(np.array(np.load(chunk / "rows.npy", mmap_mode="r")[:, start:end]))  # one map at a time
    rows = np.concatenate(parts, axis=1)
    step = np.diff(rows[0])
    if not ((step > 0) | ((step == 0) & (np.diff(rows[1]) >= 0))).all():  # often they are already sorted
        rows = rows.take(np.lexsort((rows[1], rows[0])), axis=1)
    plain = len(PLAIN[table])
    coded = {name: encode(row, codes[name]) for name, row in zip(CODED[table], rows[plain:], strict=True)}
    return [*rows[:plain], coded]


def encode(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return codes of ``values`` by the ascending ``known``, which has all of them but MISSING; that has code 0."""
    return np.searchsorted(np.append(MISSING, known), values).astype(np.int32)


def join_sessions(rows: Mapping[str, np.ndarray], navigation: int) -> dict[str, np.ndarray]:
    """Merge the rows of each session, sorted by user and time; ``navigation`` is the code of that action.

    A row belongs to the session of the row before it if user and place are the same, neither has a via point, and it is
    at most ``SESSION_GAP`` later. A session has the scenario of its first row, which was known before. Of what came
    after, it has the last: the action of its last row and the last travel mode that was given.
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
    sessions["depart"] = find_departures(rows, first, rows["action"] == navigation)
    return sessions


def _find_profiles(
    user: np.ndarray, owners: np.ndarray, number: np.ndarray, coded: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Return (U, 6) codes of these users, 0 without a profile, and who has several; ``owners`` are sorted."""
    owner, first, group = np.unique(owners, return_index=True, return_inverse=True)
    features = np.stack([*coded.values()], axis=1)[first]
    features = np.concatenate([features, np.zeros((1, features.shape[1]), np.int32)])
    found = np.searchsorted(owner, user)
    found[np.append(owner, 0)[found] != user] = len(owner)
    again = np.delete(np.arange(len(number)), first)
    return features[found], list(zip(owners[again], number[first][group[again]], number[again], strict=True))
