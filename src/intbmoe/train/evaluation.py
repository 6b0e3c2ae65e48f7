"""Evaluate a model on a whole split, and load the model of a finished run."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor, nn

from intbmoe.files import digest, to_json
from intbmoe.layer import unwrap
from intbmoe.tasks import make_task
from intbmoe.tasks.base import Examples, Task
from intbmoe.train.data import evaluation_batches, read_ahead
from intbmoe.train.distribution import Ranks
from intbmoe.train.errors import TrainingError
from intbmoe.train.files import pack_tensors, read_tensors
from intbmoe.train.outcomes import MOST_EXAMPLES
from intbmoe.train.resume import restore_model
from intbmoe.train.run import RunDirectory

BATCH = 256  # examples per device and batch, unless the recipe says otherwise


def load(run: str | PathLike[str]) -> nn.Module:
    return _load(RunDirectory.existing(run))[1]


def evaluate(
    run: str | PathLike[str], split: str = "test", data: str | PathLike[str] | None = None
) -> dict[str, float]:
    """Return the metrics of a finished run's model on ``valid`` or ``test``, in the recipe's precision.

    ``data`` is the path of the data, if it is not where the run found it.
    """
    if split not in ("valid", "test"):
        raise ValueError(f"split={split!r} is not allowed: split must be 'valid' or 'test'")
    run = RunDirectory.existing(run)
    settings = run.recipe.train
    ranks = Ranks(settings.precision)
    task, model = _load(run, data)
    size = min(settings.device_batch or settings.batch, BATCH)
    return evaluate_split(task, model.to(ranks.device), split, ranks, size, settings.seed, settings.workers).metrics


def _load(run: RunDirectory, data: str | PathLike[str] | None = None) -> tuple[Task, nn.Module]:
    if not run.finished:
        raise TrainingError(f"{run.path} is not finished, so it has no model yet: train it to the end first")
    tensors = read_tensors(run.model_path, run.result["sha256"]["model.safetensors"])
    if run.result.get("weights") == HALVED:
        tensors = {name: value.float() if value.dtype == torch.float16 else value for name, value in tensors.items()}
    task = make_task(run.recipe_on(data))
    with torch.random.fork_rng(devices=[]):  # making a model draws random numbers; loading one should not
        model = task.make_model().eval()
    restore_model(model, tensors, str(run.model_path))
    return task, model


def halve(run: RunDirectory) -> dict[str, bytes]:
    """Return, by name, the files of a finished run that change when its weights are stored in half precision."""
    tensors = read_tensors(run.model_path, run.result["sha256"]["model.safetensors"])
    weights = pack_tensors(
        {name: value.half() if value.dtype == torch.float32 else value for name, value in tensors.items()}
    )
    checksums = {**run.result["sha256"], "model.safetensors": digest(weights)}
    result = {**run.result, "sha256": checksums, "weights": HALVED}
    return {run.model_path.name: weights, run.result_path.name: to_json(result)}


def read_split(task: Task, split: str) -> Examples:
    """Return the split, which must not be empty; a recipe need not hold out a validation split."""
    examples = task.split(split)
    if len(examples) == 0:
        why = "nothing was held out for validation (use --split test)" if split == "valid" else "check the data"
        raise TrainingError(f"the {split} split is empty: {why}")
    return examples


HALVED = "rounded to half precision"
"""In a run's ``done.json`` under "weights": the file is half as large, and training cannot resume from it."""


@dataclass(frozen=True)
class Evaluation:
    metrics: dict[str, float]
    outcomes: Mapping[str, Tensor] | None
    """(N,) what each example of the split, in order, added to the sums of the metrics; None if the task does not
    evaluate examples one by one, or if there are more than ``MOST_EXAMPLES``."""


@torch.no_grad()
def evaluate_split(
    task: Task, model: nn.Module, split: str, ranks: Ranks, size: int, seed: int, workers: int
) -> Evaluation:
    """Return the task's metrics on ``split``, counting each example once; each rank takes ``size`` at a time."""
    examples = read_split(task, split)
    keeps = task.has_outcomes() and len(examples) <= MOST_EXAMPLES
    model = unwrap(model)
    mode = model.training
    model.eval()
    totals: dict[str, Tensor] = {}
    read: list[int] = []
    parts: dict[str, list[Tensor]] = {}
    try:
        reads = evaluation_batches(len(examples), size, ranks.rank, ranks.world)
        for (indices, counts), batch in read_ahead(examples, reads, seed, workers, pin=ranks.device.type == "cuda"):
            # Never compiled: the last batch of a split is smaller, and would need a compilation of its own.
            with ranks.autocast(), torch.compiler.set_stance("force_eager"):
                batch = task.prepare(ranks.to_device(batch), None)
                found = (task.evaluate_examples if keeps else task.evaluate)(model, batch)
            for name, values in found.items():
                total = values.double().sum() * counts
                totals[name] = totals[name] + total if name in totals else total
                if keeps and counts:
                    parts.setdefault(name, []).append(values.double())
            if keeps and counts:
                read += indices
    finally:
        model.train(mode)
    names = sorted(totals)
    joined = ranks.sum(torch.stack([totals[name].to(ranks.device) for name in names]))
    metrics = task.metrics(dict(zip(names, joined.tolist(), strict=True)))
    outcomes = _outcomes(names, parts, read, len(examples), ranks) if keeps else None
    return Evaluation({name: float(value) for name, value in metrics.items()}, outcomes)


def _outcomes(
    names: list[str], parts: Mapping[str, list[Tensor]], read: list[int], examples: int, ranks: Ranks
) -> dict[str, Tensor]:
    """Join the outcomes of all ranks in the split's order: each rank fills in what it has read, and all are summed."""
    found = torch.zeros(len(names), examples, dtype=torch.float64)
    for row, name in zip(found, names, strict=True):
        if read:
            row[read] = torch.cat(parts[name]).cpu()
    return dict(zip(names, ranks.sum(found).cpu(), strict=True))
