"""Metrics of a whole split, and from a finished run back to its model."""

from os import PathLike

import torch
from torch import nn

from intbmoe.layer import unwrap
from intbmoe.tasks import make_task
from intbmoe.tasks.base import Examples, Task
from intbmoe.train.data import evaluation_batches, read_ahead
from intbmoe.train.distribution import Ranks
from intbmoe.train.errors import TrainingError
from intbmoe.train.files import read_tensors
from intbmoe.train.resume import restore_model
from intbmoe.train.run import RunDirectory

BATCH = 256  # examples a device takes at a time, where the recipe does not say


def load(run: str | PathLike[str]) -> nn.Module:
    return _load(RunDirectory.existing(run))[1]


def evaluate(run: str | PathLike[str], split: str = "test") -> dict[str, float]:
    """The metrics of a finished run's model on ``valid`` or ``test``, in the recipe's precision."""
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
    tensors = read_tensors(run.model_path, run.result["sha256"]["model.safetensors"])
    task = make_task(run.recipe)
    with torch.random.fork_rng(devices=[]):  # making a model draws random numbers; loading one should not
        model = task.make_model().eval()
    restore_model(model, tensors, str(run.model_path))
    return task, model


def read_split(task: Task, split: str) -> Examples:
    """The split, if it has examples; a recipe need not hold anything out for validation."""
    examples = task.split(split)
    if len(examples) == 0:
        why = "nothing was held out for validation (take --split test)" if split == "valid" else "check the data"
        raise TrainingError(f"the {split} split is empty: {why}")
    return examples


@torch.no_grad()
def evaluate_split(
    task: Task, model: nn.Module, split: str, ranks: Ranks, size: int, seed: int, workers: int
) -> dict[str, float]:
    """The task's metrics of ``split``, each example counted once; each rank takes ``size`` examples at a time."""
    examples = read_split(task, split)
    model = unwrap(model)
    mode = model.training
    model.eval()
    totals: dict[str, torch.Tensor] = {}
    try:
        reads = evaluation_batches(len(examples), size, ranks.rank, ranks.world)
        for (_, counts), batch in read_ahead(examples, reads, seed, workers, pin=ranks.device.type == "cuda"):
            # Never compiled: a split's last batch is smaller than the others, and would be compiled for itself.
            with ranks.autocast(), torch.compiler.set_stance("force_eager"):
                sums = task.evaluate(model, task.prepare(ranks.to_device(batch), None))
            for name, value in sums.items():
                value = value.detach().double() * counts
                totals[name] = totals[name] + value if name in totals else value
    finally:
        model.train(mode)
    names = sorted(totals)
    joined = ranks.sum(torch.stack([totals[name].to(ranks.device) for name in names]))
    metrics = task.metrics(dict(zip(names, joined.tolist(), strict=True)))
    return {name: float(value) for name, value in metrics.items()}
