"""Folders of arrays that are whole or not there: written beside their place and moved into it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.files import replace_file, replacing_folder, to_json

NOTE = "note.json"


def write_folder(folder: Path, arrays: Mapping[str, np.ndarray], note: Mapping[str, Any] | None = None) -> None:
    """``arrays`` as NAME.npy, with ``note`` if there is one; what was in ``folder`` is replaced."""
    for left in folder.parent.glob(f".{folder.name}.*"):  # by a kill; one process at a time prepares
        shutil.rmtree(left)
    with replacing_folder(folder) as beside:
        for name, array in arrays.items():
            np.save(beside / f"{name}.npy", array)
        if note is not None:
            write_json(beside / NOTE, note)


def read_arrays(folder: Path, names: tuple[str, ...], *, mapped: bool = False) -> dict[str, np.ndarray]:
    """Arrays of a folder, as memory maps if they are large."""
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r" if mapped else None) for name in names}


def read_note(folder: Path, stamp: Any) -> dict[str, Any] | None:
    """The note of a folder that was written for the same ``stamp``; None if there is none such."""
    note = read_json(folder / NOTE)
    return note if note is not None and note["stamp"] == stamp else None


def write_json(file: Path, content: Any) -> None:
    """The file appears whole or not at all."""
    replace_file(file, to_json(content), sync=False)


def read_json(file: Path) -> Any:
    """The content, or None if the file is not there."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None
