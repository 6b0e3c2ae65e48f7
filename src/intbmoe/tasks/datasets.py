"""Data sets given in Python: anything with ``len(data)`` and ``data[i]``, or a dict of such objects by split.

This includes a map-style torch ``Dataset``, Hugging Face's ``Dataset`` (and ``DatasetDict``, a dict by split), a list,
and, for tables of columns, a data frame. They are written once, as files that ``data.path`` accepts, so that such a run
is like any other: later commands and processes find the data.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from intbmoe.checks import some
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import split_of


def by_split(data: Any) -> dict[str, Any]:
    """Return split → data set; an undivided data set is ``train``, from which the others are then held out."""
    if not isinstance(data, Mapping):
        return {"train": data}
    found: dict[str, Any] = {}
    for key, part in data.items():
        split = split_of(str(key))
        if split is None or split in found:
            raise DataError(
                f"data has the keys {some(map(str, data))}: expected 'train', and 'valid' and 'test' if any"
            )
        found[split] = part
    if "train" not in found:
        raise DataError(f"data has the keys {some(map(str, data))} but no 'train'")
    return found


def entries(dataset: Any, where: str) -> Iterator[Any]:
    """Yield ``dataset[0]``, ``dataset[1]``, …"""
    if isinstance(dataset, str | bytes | Path):  # otherwise its letters would be the examples
        raise DataError(
            f"{where} is a {type(dataset).__name__}: give a list of examples; for files, use the setting data.path"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{where} is {type(dataset).__name__}, which has no length or cannot be indexed: give a map-style data "
            f"set, or a list of what it yields"
        )
    if len(dataset) == 0:
        raise DataError(f"{where} is empty: expected some examples")
    for index in range(len(dataset)):
        yield dataset[index]


def column_names(data: Any) -> list[str] | None:
    """Return the columns of a Hugging Face data set, Arrow table, data frame or dict of columns, otherwise None."""
    names = data.keys() if isinstance(data, Mapping) else getattr(data, "column_names", getattr(data, "columns", None))
    return None if names is None or callable(names) else [str(name) for name in names]


def field(entry: Mapping[str, Any], names: Sequence[str], option: str, where: str) -> Any:
    """Return the first of ``names`` that the entry has; ``option`` says how to give another name."""
    for name in names:
        if name in entry:
            return entry[name]
    raise DataError(f"{where} has no {names[0]!r}, only {some(map(str, entry))}{option}")
