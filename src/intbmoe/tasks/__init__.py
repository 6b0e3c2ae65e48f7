"""A task is one folder: its data, model, loss and metrics, how it is served and looked at (``base.py``).

It registers itself, and nothing about it is written anywhere else.
"""

from intbmoe.registry import find_task, list_tasks, register_task
from intbmoe.tasks.base import Batch, Examples, Task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.preparation import Preparation
from intbmoe.tasks.recipe import Recipe


def make_task(recipe: Recipe) -> Task:
    """The recipe's task. Nothing is read yet: data is, at the first use of a split."""
    task = find_task(recipe.task)
    if not isinstance(recipe, task.recipe_type):
        expected = task.recipe_type.__name__
        raise TypeError(f"the task {recipe.task!r} takes a {expected}, this recipe is a {type(recipe).__name__}")
    return task(recipe)


def list_preparations() -> dict[str, Preparation]:
    """What ``intbmoe prepare`` can make ready, by name."""
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
