"""Training: one loop for every task and method, and the run directory that it writes.

``intbmoe.train(recipe, …)`` is ``intbmoe.train.train``. Importing this package makes ``intbmoe.train`` the name of the
package, so the package itself can be called.
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
