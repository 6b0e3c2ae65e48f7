"""Training: one loop for every task and method, and the run directory it leaves.

``intbmoe.train(recipe, …)`` is ``intbmoe.train.train``: importing this package puts it in the place of any function of
that name, so it can be called itself.
"""

import sys
from types import ModuleType
from typing import Any

from intbmoe.train.errors import (
    DamagedFileError,
    DiskFullError,
    NonFiniteLossError,
    RunConflictError,
    TrainingError,
    TrainingInterrupted,
)
from intbmoe.train.evaluation import evaluate, load
from intbmoe.train.loop import train
from intbmoe.train.run import RunDirectory

__all__ = [
    "DamagedFileError", "DiskFullError", "NonFiniteLossError", "RunConflictError", "RunDirectory", "TrainingError",
    "TrainingInterrupted", "evaluate", "load", "train",
]  # fmt: skip


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> RunDirectory:
        return train(*args, **options)


_Callable.__call__.__doc__ = train.__doc__
sys.modules[__name__].__class__ = _Callable
