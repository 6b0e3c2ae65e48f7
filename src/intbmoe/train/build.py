"""Building a training: from a recipe to its task, data, model, optimizer and stepper."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from intbmoe.layer import unwrap
from intbmoe.precision import bfloat16_is_slow
from intbmoe.tasks import make_task
from intbmoe.tasks.base import Examples, Task
from intbmoe.tasks.recipe import Recipe, TrainSettings
from intbmoe.train.data import BatchPlan, derive_seed, plan_batches
from intbmoe.train.distribution import Ranks
from intbmoe.train.optimizer import make_optimizer
from intbmoe.train.step import Stepper


class Built(NamedTuple):
    task: Task
    examples: Examples  # of the training split
    plan: BatchPlan
    model: nn.Module  # on this rank's device, compiled, replicated or sharded as the recipe and the launcher say
    optimizer: torch.optim.Optimizer
    stepper: Stepper


def build(recipe: Recipe, ranks: Ranks) -> Built:
    """Everything that follows from the recipe; the weights follow from its seed."""
    settings = recipe.train
    task = make_task(recipe)
    examples = task.split("train")
    plan = plan_batches(len(examples), settings, ranks.world)
    torch.manual_seed(derive_seed(settings.seed, "model"))
    model = ranks.place(task.make_model().train(), settings)
    optimizer = make_optimizer(unwrap(model), settings)
    return Built(task, examples, plan, model, optimizer, Stepper(task, model, optimizer, ranks, settings))


def doubts(settings: TrainSettings, plan: BatchPlan, device: torch.device) -> Iterator[str]:
    """Warnings about settings that are allowed and hardly meant."""
    if settings.precision == "bfloat16" and bfloat16_is_slow(device):
        yield (
            "train.precision='bfloat16' is far slower than float32 on this CPU, which has no instructions for it: "
            "--train.precision float32"
        )
    warmup = plan.epochs_to_steps(settings.warmup) if settings.warmup else 0
    if warmup > plan.steps:
        yield (
            f"train.warmup={settings.warmup:g} epochs are {warmup} steps, more than the {plan.steps} of this run: its "
            f"learning rate never reaches train.lr={settings.lr:g}"
        )
