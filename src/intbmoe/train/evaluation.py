"""Metrics of a whole split, over all ranks."""

import torch
from torch import nn

from intbmoe.layer import unwrap
from intbmoe.tasks.base import Task
from intbmoe.train.data import evaluation_batches, read_ahead
from intbmoe.train.distribution import Ranks
from intbmoe.train.errors import TrainingError


@torch.no_grad()
def evaluate_split(
    task: Task, model: nn.Module, split: str, ranks: Ranks, size: int, seed: int, workers: int
) -> dict[str, float]:
    """The task's metrics of ``split``, each example counted once; ``size`` examples a rank at a time."""
    examples = task.split(split)
    if len(examples) == 0:
        raise TrainingError(f"the {split} split is empty")
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
