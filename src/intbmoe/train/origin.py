"""Which recipe and data a checkpoint was trained with. Only a run with the same recipe and data may resume from it.

The fingerprint of the data is cheap at any size: the number of examples in each split, a few examples as the model gets
them, the number of files and their names, and the size and content of some. Small data is read in full.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from intbmoe.recipes import recipe_from_dict, recipe_to_dict
from intbmoe.tasks.base import SPLITS, Examples, Task
from intbmoe.tasks.own_data import fingerprint
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.errors import RunConflictError
from intbmoe.train.run import FREE_TO_CHANGE, differing_keys, differing_settings, list_differences

EXAMPLES = 32  # per split
FILES = 1000  # under one path
BYTES = 64 * 2**20  # over all files
PIECES = 16  # read from a large file
ROUNDING = 1e-3  # how far decoding and normalising may differ on another machine
REMEDY = "put the data back as it was, or start a separate run (--name, --moe.label or another --root)"


def describe_origin(task: Task) -> dict[str, Any]:
    """Return what a checkpoint stores about its run, as plain JSON values."""
    return {"recipe": recipe_to_dict(task.recipe), "data": describe_data(task)}


def describe_data(task: Task) -> dict[str, Any]:
    splits = {name: task.split(name) for name in SPLITS}
    found = {name: {"examples": len(examples), **_sample(examples)} for name, examples in splits.items()}
    return {**found, "files": {key: _describe_files(Path(path)) for key, path in _paths(task.recipe.data)}}


def require_same_origin(
    there: Mapping[str, Any] | None, now: Mapping[str, Any], recipe: Recipe, where: Path, tell: Callable[[str], None]
) -> None:
    """Raise unless the checkpoint in the folder ``where`` has the same recipe and data."""
    if there is None:
        tell(f"{where} is too old to name its settings and data: it is used without checking them")
        return
    settings = differing_settings(recipe_from_dict(there["recipe"]), recipe, free=(*FREE_TO_CHANGE, "data.path"))
    if settings:
        raise RunConflictError(
            f"{where} is a checkpoint of another run:\n{list_differences(settings)}\n"
            f"Remove it, and restore this run's own if you have a copy; the run then resumes from the newest one left."
        )
    data = {key: values for key, values in differing_keys(there["data"], now["data"]).items() if not _close(*values)}
    if data:
        raise RunConflictError(
            f"the data is not what the checkpoint in {where} was trained on:\n{list_differences(data)}\n"
            f"To go on, {REMEDY}."
        )


def _close(old: Any, new: Any) -> bool:
    numbers = isinstance(old, float) and isinstance(new, float)
    return numbers and math.isclose(old, new, rel_tol=ROUNDING, abs_tol=ROUNDING)


def _sample(examples: Examples) -> dict[str, Any]:
    """Return, by batch entry, a description of a few evenly spread examples."""
    count = len(examples)
    if not count:
        return {}
    indices = sorted({index * count // EXAMPLES for index in range(EXAMPLES)})
    return {name: _describe_tensor(value) for name, value in sorted(examples.batch(indices, epoch=0, seed=0).items())}


def _describe_tensor(values: Tensor) -> str | dict[str, Any]:
    if not values.is_floating_point():
        return fingerprint(values.numpy())
    finite = values.double()[values.isfinite()]
    size = math.sqrt(float(finite.square().mean())) if len(finite) else 0.0
    mean = float(finite.mean()) if len(finite) else 0.0
    return {"shape": list(values.shape), "not finite": values.numel() - len(finite), "mean": mean, "size": size}


def _paths(settings: Any, prefix: str = "data") -> Iterator[tuple[str, str]]:
    """Yield the settings that name a file or folder: ``path``, and any absolute path."""
    values = asdict(settings) if is_dataclass(settings) else settings
    for key, value in values.items() if isinstance(values, dict) else ():
        name = f"{prefix}.{key}"
        if isinstance(value, dict):
            yield from _paths(value, name)
        elif isinstance(value, str) and (key == "path" or os.path.isabs(value)) and os.path.exists(value):
            yield name, value


def _describe_files(root: Path) -> dict[str, Any]:
    names = sorted(_names(root)) if root.is_dir() else [""]
    some = names[:: -(-len(names) // FILES)] if names else []
    files = [root / name if name else root for name in some]
    sizes = [file.stat().st_size for file in files]
    share = BYTES // max(1, len(files))
    contents = [piece for file, size in zip(files, sizes, strict=True) for piece in _content(file, size, share)]
    return {"files": len(names), "bytes": sum(sizes), "content": fingerprint("\0".join(names), *contents)}


def _names(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)


def _content(file: Path, size: int, share: int) -> Iterator[np.ndarray]:
    """Yield the whole file, or evenly spread pieces of it from beginning to end."""
    length = size if size <= share else share // PIECES
    starts = [0] if size <= share else [(size - length) * piece // (PIECES - 1) for piece in range(PIECES)]
    with open(file, "rb") as content:
        for start in starts:
            content.seek(start)
            yield np.frombuffer(content.read(length), np.uint8)
