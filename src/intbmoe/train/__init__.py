"""Training: one loop for every task and method, and the run directory it leaves."""

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
from intbmoe.train.run import RunDirectory, find_runs

__all__ = [
    "DamagedFileError", "DiskFullError", "NonFiniteLossError", "RunConflictError", "RunDirectory", "TrainingError",
    "TrainingInterrupted", "evaluate", "find_runs", "load", "train",
]  # fmt: skip
