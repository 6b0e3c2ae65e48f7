"""Item sequences from one ``.npz`` file: ``docs/data.md`` says which arrays it holds.

Two forms, of which both become the same: *check-ins*, a row for each visit in the order of (user, time), and
*item lists*, every user's items one after the other. Nothing is sorted or repaired here: a file that is not as
described is an error that names the file, the array and the row.
"""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import require_path

WHAT, PAGE = "an .npz file of item sequences", "docs/data.md"
CHECK_INS = ("user", "poi", "time")
ITEM_LISTS = ("items", "offsets")
LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class ItemSequences:
    """The items of each user from old to new, user after user."""

    items: np.ndarray  # (N,) int64, from 0
    offsets: np.ndarray  # (users + 1,) int64: user u has the events offsets[u] to offsets[u + 1] − 1
    item_count: int
    names: tuple[str, ...] | None = None  # of the items, by number; None where they have none but their numbers

    @property
    def lengths(self) -> np.ndarray:
        """(users,) int64, events of each user."""
        return np.diff(self.offsets)

    def first_visits(self) -> np.ndarray:
        """(N,) bool: whether an event is the first of its user with that item."""
        users = np.repeat(np.arange(len(self.offsets) - 1), self.lengths)
        first = np.zeros(len(self.items), dtype=bool)
        first[np.unique(users * self.item_count + self.items, return_index=True)[1]] = True
        return first


def read_check_ins(path: str | None, item_count: int) -> ItemSequences:
    """Places visited: ``user``, ``poi`` (from 0) and ``time`` of each check-in, in the order of (user, time)."""
    file = require_path(path, "check-ins", WHAT, PAGE)
    arrays = _read_arrays(file, CHECK_INS)
    user, time = arrays["user"], arrays["time"]
    for name in ("poi", "time"):
        rows = len(arrays[name])
        if rows != len(user):
            raise DataError(f"{file}: {name!r} has {rows} rows and 'user' has {len(user)}: expected as many")
    _refuse(np.diff(user) < 0, f"{file}: 'user'", user[1:], "rows in the order of (user, time)", first_row=1)
    same = np.diff(user) == 0
    _refuse(same & (np.diff(time) < 0), f"{file}: 'time'", time[1:], "rows of a user in the order of time", first_row=1)
    _check_ids(arrays["poi"], 0, item_count, f"{file}: 'poi'")
    starts = np.concatenate([[0], np.flatnonzero(~same) + 1, [len(user)]])
    return ItemSequences(arrays["poi"].astype(np.int64), starts.astype(np.int64), item_count)


def read_item_lists(path: str | None, item_count: int) -> ItemSequences:
    """Items bought or reviewed: ``items`` (from 1), of which user u has those of offsets[u] to offsets[u + 1] − 1."""
    file = require_path(path, "item-lists", WHAT, PAGE)
    arrays = _read_arrays(file, ITEM_LISTS)
    items, offsets = arrays["items"], arrays["offsets"]
    if offsets[0] != 0 or offsets[-1] != len(items):
        raise DataError(
            f"{file}: 'offsets' runs from {offsets[0]} to {offsets[-1]}: "
            f"expected from 0 to {len(items)}, the number of 'items'"
        )
    _refuse(np.diff(offsets) < 0, f"{file}: 'offsets'", offsets[1:], "offsets that never fall", first_row=1)
    _check_ids(items, 1, item_count, f"{file}: 'items'")
    return ItemSequences(items.astype(np.int64) - 1, offsets.astype(np.int64), item_count)


def _read_arrays(file: Path, names: tuple[str, ...]) -> Mapping[str, np.ndarray]:
    # What numpy raises depends on where a file is cut off or what else it is. Object arrays, which could hold code,
    # are never read.
    broken = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError)
    arrays = {}
    try:
        opened = np.load(file, allow_pickle=False)
    except broken as error:
        raise DataError(f"{file} cannot be read: {error}; expected {WHAT} (see docs/data.md)") from error
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise DataError(f"{file} holds a single array: expected {WHAT} with {', '.join(map(repr, names))}")
    with opened:
        for name in names:
            if name not in opened.files:
                found = ", ".join(map(repr, opened.files)) or "nothing"
                raise DataError(f"{file}: the array {name!r} is missing: expected {names}, found {found}")
            try:
                arrays[name] = opened[name]
            except broken as error:
                fix = "store whole numbers in it" if "Object arrays" in str(error) else "get the file again"
                raise DataError(f"{file}: the array {name!r} cannot be read: {error}; {fix}") from error
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            found = f"{array.dtype} of shape {array.shape}"
            raise DataError(f"{file}: {name!r} is {found}: expected whole numbers in one dimension")
        if len(array) == 0:
            raise DataError(f"{file}: {name!r} is empty: expected at least one row")
        _refuse(array > LARGEST, f"{file}: {name!r}", array, f"numbers of at most {LARGEST}")
    # Unsigned differences would wrap around.
    return {name: array.astype(np.int64) for name, array in arrays.items()}


def _check_ids(ids: np.ndarray, lowest: int, item_count: int, where: str) -> None:
    """Raise unless the ids are ``lowest`` to ``lowest + item_count − 1``, and the last of them occurs."""
    last = lowest + item_count - 1
    allowed = f"{lowest} to {last}, as many as model.items={item_count}"
    fix = f"for this file set model.items={ids.max() - lowest + 1}"
    _refuse(ids < lowest, where, ids, f"ids from {allowed}")
    _refuse(ids > last, where, ids, f"ids from {allowed}; {fix}")
    if ids.max() != last:
        raise DataError(f"{where} goes up to {ids.max()}: expected ids from {allowed}; {fix}")


def _refuse(bad: np.ndarray, where: str, values: np.ndarray, expected: str, first_row: int = 0) -> None:
    """Raise for the first row that is bad, with its value; rows count from 0."""
    if bad.any():
        index = int(np.argmax(bad))
        raise DataError(f"{where}, row {index + first_row}, is {values[index]}: expected {expected}")
