"""Item sequences from one ``.npz`` file; ``docs/data.md`` says which arrays it holds.

There are two forms with the same result: *check-ins*, one row per visit, sorted by (user, time), and *item lists*, the
items of one user after the other. Nothing is sorted or repaired here: a file that is not as described is an error that
names the file, the array and the row.
"""

from dataclasses import dataclass

import numpy as np

from intbmoe.tasks.arrays import VISITS, check_visits, read_arrays, refuse
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import require_path

WHAT, PAGE = "an .npz file of item sequences", "docs/data.md"
ITEM_LISTS = ("items", "offsets")


@dataclass(frozen=True)
class ItemSequences:
    """The items of each user from old to new, one user after the other."""

    items: np.ndarray  # (N,) int64, from 0
    offsets: np.ndarray  # (users + 1,) int64: user u has the events offsets[u] to offsets[u + 1] − 1
    item_count: int
    names: tuple[str, ...] | None = None  # of the items, by number; None if they have only numbers
    fingerprint: str | None = None  # if they come from a table

    @property
    def lengths(self) -> np.ndarray:
        """(users,) int64, events of each user."""
        return np.diff(self.offsets)

    def first_visits(self) -> np.ndarray:
        """Return (N,) bool: whether an event is its user's first with that item."""
        users = np.repeat(np.arange(len(self.offsets) - 1), self.lengths)
        first = np.zeros(len(self.items), dtype=bool)
        first[np.unique(users * self.item_count + self.items, return_index=True)[1]] = True
        return first


def read_check_ins(path: str | None, item_count: int) -> ItemSequences:
    """Read visited places: ``user``, ``poi`` (from 0) and ``time`` of each check-in, sorted by (user, time)."""
    file = require_path(path, "check-ins", WHAT, PAGE)
    arrays = read_arrays(file, WHAT, VISITS)
    starts = check_visits(file, arrays)
    _check_ids(arrays["poi"], 0, item_count, f"{file}: 'poi'")
    return ItemSequences(arrays["poi"], starts, item_count)


def read_item_lists(path: str | None, item_count: int) -> ItemSequences:
    """Read items bought or reviewed: ``items`` (from 1); user u has offsets[u] to offsets[u + 1] − 1."""
    file = require_path(path, "item-lists", WHAT, PAGE)
    arrays = read_arrays(file, WHAT, ITEM_LISTS)
    items, offsets = arrays["items"], arrays["offsets"]
    if offsets[0] != 0 or offsets[-1] != len(items):
        raise DataError(
            f"{file}: 'offsets' runs from {offsets[0]} to {offsets[-1]}: "
            f"expected from 0 to {len(items)}, the number of 'items'"
        )
    refuse(np.diff(offsets) < 0, f"{file}: 'offsets'", offsets[1:], "offsets that never decrease", first_row=1)
    _check_ids(items, 1, item_count, f"{file}: 'items'")
    return ItemSequences(items - 1, offsets, item_count)


def _check_ids(ids: np.ndarray, lowest: int, item_count: int, where: str) -> None:
    """Raise unless the ids are from ``lowest`` to ``lowest + item_count − 1``, and the last of them occurs."""
    last = lowest + item_count - 1
    allowed = f"{lowest} to {last}, as many as model.items={item_count}"
    fix = f"for this file set model.items={ids.max() - lowest + 1}"
    refuse(ids < lowest, where, ids, f"ids from {allowed}")
    refuse(ids > last, where, ids, f"ids from {allowed}; {fix}")
    if ids.max() != last:
        raise DataError(f"{where} goes up to {ids.max()}: expected ids from {allowed}; {fix}")
