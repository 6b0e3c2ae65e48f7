"""Texts that live in Python, written out as .jsonl files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intbmoe.tasks.datasets import by_split, entries, field
from intbmoe.tasks.errors import DataError


def save_texts(data: Any, folder: Path, column: str) -> None:
    """Strings, or dicts with the text under ``column``; one document each."""
    for split, dataset in by_split(data).items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for index, entry in enumerate(entries(dataset, f"data[{split!r}]")):
                where = f"data[{split!r}][{index}]"
                option = '; name the one with the text: settings={"data.column": NAME}'
                text = field(entry, (column,), option, where) if isinstance(entry, Mapping) else entry
                if not isinstance(text, str):
                    raise DataError(f"{where} is {type(text).__name__}: expected a string, or a dict with {column!r}")
                file.write(json.dumps({column: text}) + "\n")
