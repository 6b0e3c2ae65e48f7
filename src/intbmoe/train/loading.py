"""From a run directory back to its model, and to the metrics of a split."""

from pathlib import Path

import torch
from torch import nn

from intbmoe.tasks import make_task
from intbmoe.tasks.base import Task
from intbmoe.train.distribution import Ranks
from intbmoe.train.errors import TrainingError
from intbmoe.train.evaluation import evaluate_split
from intbmoe.train.files import read_tensors
from intbmoe.train.run import RunDirectory
from intbmoe.train.state import restore_model

BATCH = 256
"""Examples a device takes at a time, where the recipe does not say."""


def load(run: RunDirectory | str | Path) -> nn.Module:
    """The trained model of a finished run, on the CPU and in evaluation mode."""
    return _load(RunDirectory.existing(run))[1]


def evaluate(run: RunDirectory | str | Path, split: str = "test") -> dict[str, float]:
    """The metrics of a finished run's model on ``valid`` or ``test``, on the recipe's precision."""
    if split not in ("valid", "test"):
        raise ValueError(f"split={split!r} is not allowed: split must be 'valid' or 'test'")
    run = RunDirectory.existing(run)
    settings = run.recipe.train
    ranks = Ranks(settings.precision)
    task, model = _load(run)
    size = min(settings.device_batch or settings.batch, BATCH)
    return evaluate_split(task, model.to(ranks.device), split, ranks, size, settings.seed, settings.workers)


def _load(run: RunDirectory) -> tuple[Task, nn.Module]:
    if not run.finished:
        raise TrainingError(f"{run.path} is not finished, so it has no model yet: train it to its end first")
    checksum = run.result["sha256"]["model.safetensors"]
    tensors = read_tensors(run.model_path, checksum)
    task = make_task(run.recipe)
    with torch.random.fork_rng(devices=[]):  # making a model draws random numbers; loading one should not
        model = task.make_model()
    restore_model(model, tensors, str(run.model_path))
    return task, model.eval()
