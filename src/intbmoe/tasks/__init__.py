"""Benchmarks: for each its data, its model, its loss and its metrics. ``base.py`` says what the loop asks of one."""

from intbmoe.checks import did_you_mean
from intbmoe.tasks.base import Batch, Examples, Task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language.task import LanguageTask
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.sequences.task import SequencesTask
from intbmoe.tasks.travel.task import TravelTask
from intbmoe.tasks.vision.task import VisionTask

TASKS: dict[str, type[Task]] = {
    "vision": VisionTask,
    "sequences": SequencesTask,
    "language": LanguageTask,
    "travel": TravelTask,
}


def find_task(name: str) -> type[Task]:
    """The task of that name; a misspelt name is an error with a suggestion."""
    if name not in TASKS:
        raise KeyError(f"no task is called {name!r}: {did_you_mean(name, TASKS)}")
    return TASKS[name]


def make_task(recipe: Recipe) -> Task:
    """The recipe's task. Nothing is read yet: data is, at the first use of a split."""
    task = find_task(recipe.task)
    if not isinstance(recipe, task.recipe_type):
        expected = task.recipe_type.__name__
        raise TypeError(f"the task {recipe.task!r} takes a {expected}, this recipe is a {type(recipe).__name__}")
    return task(recipe)


__all__ = ["TASKS", "Batch", "DataError", "Examples", "Task", "find_task", "make_task"]
