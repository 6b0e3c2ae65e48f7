"""A task is one folder: its data, model, loss and metrics, and how it is served and analysed (``base.py``).

It registers itself, and nothing about it is written anywhere else.
"""

from intbmoe.registry import find_task, list_tasks, register_task
from intbmoe.tasks.base import Batch, Examples, Task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.preparation import Preparation
from intbmoe.tasks.recipe import Recipe


def make_task(recipe: Recipe) -> Task:
    """Return the recipe's task; its data is read only when a split is first used."""
    task = find_task(recipe.task)
    if not isinstance(recipe, task.recipe_type):
        expected = task.recipe_type.__name__
        raise TypeError(f"the task {recipe.task!r} takes a {expected}, but this recipe is a {type(recipe).__name__}")
    return task(recipe)


def list_preparations() -> dict[str, Preparation]:
    """Return what ``intbmoe prepare`` can prepare, by name."""
    return {name: found for task in list_tasks() for name, found in find_task(task).preparations.items()}


__all__ = [
    "Batch",
    "DataError",
    "Examples",
    "Task",
    "find_task",
    "list_preparations",
    "list_tasks",
    "make_task",
    "register_task",
]
