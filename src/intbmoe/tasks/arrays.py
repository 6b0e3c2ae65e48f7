"""Arrays in files; errors in an ``.npz`` file name the file, the array and the row that is wrong.

Nothing is sorted or repaired, and object arrays, which could hold code, are never read.
"""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from intbmoe.tasks.errors import DataError

LARGEST = np.iinfo(np.int64).max
# What numpy raises depends on where a file is cut off, or what kind of file it is.
BROKEN = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError)
VISITS = ("user", "poi", "time")


def map_array(path: Path, dtype: np.dtype) -> np.ndarray:
    """Map a whole file into memory."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def read_arrays(
    file: Path, what: str, names: Sequence[str], numbers: Sequence[str] = (), optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Read ``names`` as integers (int64), ``numbers`` as float64, and ``optional`` integers if they are there."""
    arrays = {}
    try:
        opened = np.load(file, allow_pickle=False)
    except BROKEN as error:
        raise DataError(f"{file} cannot be read: {error}; expected {what} (see docs/data.md)") from error
    wanted = (*names, *numbers)
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise DataError(f"{file} holds a single array: expected {what} with {', '.join(map(repr, wanted))}")
    with opened:
        for name in (*wanted, *(name for name in optional if name in opened.files)):
            if name not in opened.files:
                found = ", ".join(map(repr, opened.files)) or "nothing"
                raise DataError(f"{file}: the array {name!r} is missing: expected {wanted}, found {found}")
            try:
                arrays[name] = opened[name]
            except BROKEN as error:
                fix = "store whole numbers in it" if "Object arrays" in str(error) else "get the file again"
                raise DataError(f"{file}: the array {name!r} cannot be read: {error}; {fix}") from error
    for name, array in arrays.items():
        kinds, expected = ("iuf", "numbers") if name in numbers else ("iu", "whole numbers")
        if array.ndim != 1 or array.dtype.kind not in kinds:
            found = f"{array.dtype} of shape {array.shape}"
            raise DataError(f"{file}: {name!r} is {found}: expected {expected} in one dimension")
        if len(array) == 0:
            raise DataError(f"{file}: {name!r} is empty: expected at least one row")
        if name not in numbers:
            refuse(array > LARGEST, f"{file}: {name!r}", array, f"numbers of at most {LARGEST}")
    # Unsigned differences would wrap around.
    return {name: array.astype(np.float64 if name in numbers else np.int64) for name, array in arrays.items()}


def check_visits(file: Path, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return (users + 1,) where each user's rows begin; raise unless rows are sorted by (user, time)."""
    user, time = arrays["user"], arrays["time"]
    for name in ("poi", "time"):
        check_length(file, arrays, name, "user")
    refuse(np.diff(user) < 0, f"{file}: 'user'", user[1:], "rows sorted by (user, time)", first_row=1)
    same = np.diff(user) == 0
    refuse(same & (np.diff(time) < 0), f"{file}: 'time'", time[1:], "each user's rows sorted by time", first_row=1)
    return np.concatenate([[0], np.flatnonzero(~same) + 1, [len(user)]]).astype(np.int64)


def check_length(file: Path, arrays: dict[str, np.ndarray], name: str, other: str) -> None:
    rows, expected = len(arrays[name]), len(arrays[other])
    if rows != expected:
        raise DataError(f"{file}: {name!r} has {rows} rows and {other!r} has {expected}: expected the same number")


def refuse(bad: np.ndarray, where: str, values: np.ndarray, expected: str, first_row: int = 0) -> None:
    """Raise an error for the first bad row, with its value; rows count from 0."""
    if bad.any():
        index = int(np.argmax(bad))
        raise DataError(f"{where}, row {index + first_row}, is {values[index]}: expected {expected}")
