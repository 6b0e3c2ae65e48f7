"""Write a data set given in Python to files beside its runs, under a name derived from its content."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from intbmoe.files import file_digest, make_public, private_folder
from intbmoe.recipes import list_recipes, load_recipe
from intbmoe.tasks import find_task
from intbmoe.tasks.recipe import Recipe


def store_data(recipe: Recipe, data: Any, folder: Path) -> Recipe:
    """Return the recipe that reads ``data`` from ``folder``/data-…; the same data is not written twice."""
    task = find_task(recipe.task)
    if task.own_source is not None and recipe.data.source != task.own_source:
        fit = [name for name in list_recipes() if _takes_data(load_recipe(name))]
        raise ValueError(
            f"the recipe {recipe.name!r} reads data.source={recipe.data.source!r}, not data from Python: use "
            f"{' or '.join(map(repr, fit))}, or set data.source={task.own_source!r}"
        )
    if task.own_source is not None and recipe.data.path is not None:
        raise ValueError(f"data.path={recipe.data.path!r} and data= were both given: leave one out")
    folder.mkdir(parents=True, exist_ok=True)
    with private_folder(folder, ".data.", ".part") as beside:
        task.save_data(data, beside, recipe.data)
        place = folder / f"data-{_digest(beside)}"
        if not place.is_dir():
            make_public(beside)
            try:
                os.rename(beside, place)
            except OSError:
                if not place.is_dir():  # otherwise another process was faster and wrote the same data
                    raise
    return replace(recipe, data=replace(recipe.data, path=str(place)))


def _takes_data(recipe: Recipe) -> bool:
    own = find_task(recipe.task).own_source
    return own is not None and recipe.data.source == own


def _digest(folder: Path) -> str:
    """Hash the names and contents of all files; twelve digits are enough to tell data sets apart."""
    sha256 = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        sha256.update(f"{file.relative_to(folder)}\0{file_digest(file)}\n".encode(errors="surrogateescape"))
    return sha256.hexdigest()[:12]
