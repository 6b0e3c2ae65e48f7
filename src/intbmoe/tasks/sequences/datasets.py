"""Events that live in Python, written out as a .csv file."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intbmoe.tasks.datasets import column_names, entries
from intbmoe.tasks.errors import DataError

COLUMNS = ("user", "item", "time")


def save_events(data: Any, folder: Path) -> None:
    """(user, item, time) rows; or dicts, or a table of columns, whose names are then found as those of a file are."""
    columns = column_names(data)
    with open(folder / "events.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if columns is not None:
            writer.writerow(columns)
            writer.writerows(zip(*(_values(data[name]) for name in columns), strict=True))
            return
        for index, entry in enumerate(entries(data, "data")):
            if isinstance(entry, Mapping):
                names = tuple(map(str, entry))
                row = list(entry.values())
            else:
                names, row = COLUMNS, entry
            if not isinstance(row, tuple | list) or len(row) != len(names):
                raise DataError(f"data[{index}] is {entry!r}: expected (user, item, time), or a dict with these")
            if index == 0:
                header = names
                writer.writerow(header)
            elif names != header:
                raise DataError(f"data[{index}] has {', '.join(names)}, but data[0] has {', '.join(header)}")
            writer.writerow(row)


def _values(column: Any) -> list[Any]:
    for name in ("to_pylist", "tolist"):  # Arrow's, and numpy's, torch's and pandas'
        if hasattr(column, name):
            return getattr(column, name)()
    return list(column)
