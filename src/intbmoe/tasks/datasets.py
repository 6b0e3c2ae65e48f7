"""Data sets that live in Python: anything with ``len(data)`` and ``data[i]``, or a dict of such by split.

A torch ``Dataset`` of the map style is one, so are Hugging Face's ``Dataset`` (and ``DatasetDict``, a dict by split), a
list, and for tables of columns a data frame. They are written out once, as files that ``data.path`` takes, so that a
run of theirs is like any other: commands and processes that come later find the data.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from intbmoe.checks import some
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import split_of


def by_split(data: Any) -> dict[str, Any]:
    """Split → data set; one that is not divided is all ``train``, of which the others are then held out."""
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
    """``dataset[0]``, ``dataset[1]``, …; an error of its own says which one it was."""
    if isinstance(dataset, str | bytes | Path):  # else its letters would be the examples
        raise DataError(
            f"{where} is a {type(dataset).__name__}: give a list of examples; files are named by the setting data.path"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{where} is {type(dataset).__name__}, which has no length or cannot be read at a place: give a map-style "
            f"data set, or a list of what it yields"
        )
    if len(dataset) == 0:
        raise DataError(f"{where} is empty: expected some examples")
    for index in range(len(dataset)):
        yield dataset[index]


def column_names(data: Any) -> list[str] | None:
    """Of a Hugging Face data set, an Arrow table, a data frame or a dict of columns; None for anything else."""
    names = data.keys() if isinstance(data, Mapping) else getattr(data, "column_names", getattr(data, "columns", None))
    return None if names is None or callable(names) else [str(name) for name in names]


def field(entry: Mapping[str, Any], names: Sequence[str], option: str, where: str) -> Any:
    """The first of ``names`` that the entry has; ``option`` says how to name another."""
    for name in names:
        if name in entry:
            return entry[name]
    raise DataError(f"{where} has no {names[0]!r}, only {some(map(str, entry))}{option}")
