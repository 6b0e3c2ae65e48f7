"""Build what a training run needs from a task: data, model, optimizer (with its learning rate) and stepper."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from intbmoe.layer import unwrap
from intbmoe.precision import bfloat16_is_slow
from intbmoe.steps import plan_steps
from intbmoe.tasks.base import Examples, Task
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train.data import BatchPlan, derive_seed, plan_batches
from intbmoe.train.distribution import Ranks
from intbmoe.train.errors import TrainingError
from intbmoe.train.shards import is_sharded
from intbmoe.train.start import begin_with
from intbmoe.train.step import Stepper

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


class Built(NamedTuple):
    examples: Examples  # of the training split
    plan: BatchPlan
    model: nn.Module  # on this rank's device; compiled, replicated or sharded as the recipe and the launcher ask
    optimizer: torch.optim.Optimizer
    stepper: Stepper


def build(task: Task, ranks: Ranks, begins: bool = True) -> Built:
    """Build everything that the task's recipe describes; its seed determines the initial weights.

    When training resumes (``begins`` is False), a checkpoint replaces these weights and ``train.start`` is ignored.
    """
    settings = task.recipe.train
    examples = task.split("train")
    plan = plan_batches(len(examples), settings, ranks.world)
    torch.manual_seed(derive_seed(settings.seed, "model"))
    try:
        model = task.make_model().train()
    except ValueError as error:  # settings that contradict each other, e.g. a method that looks ahead in a text model
        raise TrainingError(str(error)) from error
    if begins and settings.start is not None:
        begin_with(model, settings.start)
    plan_steps(model, plan.steps)  # before the model is placed: a replica keeps the buffers it was created with
    model = ranks.place(model, settings)
    optimizer = make_optimizer(unwrap(model), settings)
    return Built(examples, plan, model, optimizer, Stepper(task, model, optimizer, ranks, settings))


def doubts(settings: TrainSettings, plan: BatchPlan, device: torch.device) -> Iterator[str]:
    """Yield warnings about settings that are allowed but probably not intended."""
    if settings.precision == "bfloat16" and bfloat16_is_slow(device):
        yield (
            "train.precision='bfloat16' is far slower than float32 on this CPU, which has no bfloat16 instructions: "
            "use --train.precision float32"
        )
    if settings.batch > plan.examples:
        yield (
            f"train.batch={settings.batch} is more than the {plan.examples} training examples: each step takes all of "
            "them, and an epoch is one step. Lower train.batch for more steps per epoch"
        )
    warmup = plan.epochs_to_steps(settings.warmup) if settings.warmup else 0
    if warmup > plan.steps:
        yield (
            f"train.warmup={settings.warmup:g} epochs are {warmup} steps, more than the {plan.steps} of this run: the "
            f"learning rate never reaches train.lr={settings.lr:g}"
        )


def decay_group(model: nn.Module, name: str) -> str:
    """Return the name that ``train.undecayed`` uses for the parameter ``name``; "weights" if it always decays.

    Biases are recognised by their name and norms by their module. For any other parameter, the module that holds it, or
    one that encloses it, may give the group (``DECAY_GROUPS``). If none does, scalars and vectors count as scales.
    """
    path = name.split(".")
    owners = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    if path[-1] == "bias":  # by name, because the biases of stacked experts have two dimensions
        return "biases"
    if isinstance(owners[-1], NORMS):
        return "norms"
    for owner, attribute in zip(reversed(owners), reversed(path), strict=True):
        if attribute in getattr(owner, "DECAY_GROUPS", {}):
            return owner.DECAY_GROUPS[attribute]
    return "scales" if model.get_parameter(name).dim() <= 1 else "weights"


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Return AdamW with separate parameter groups: decayed or exempted by ``undecayed``, whole or sharded.

    torch's fused AdamW cannot mix whole and sharded tensors in one group.
    """
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spared, sharded = decay_group(model, name) in settings.undecayed, is_sharded(parameter)
            group = groups.setdefault((spared, sharded), {"params": [], **({"weight_decay": 0.0} if spared else {})})
            group["params"].append(parameter)
    return torch.optim.AdamW(
        [groups[key] for key in sorted(groups)],
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def learning_rate(step: int, settings: TrainSettings, plan: BatchPlan) -> float:
    """Return the rate of ``step`` (from 0): linear warmup to ``lr``, then constant or a half cosine to ``final_lr``."""
    warmup = start = round(settings.warmup * plan.steps_per_epoch)
    end = plan.steps - round(settings.cooldown * plan.steps_per_epoch)
    if settings.schedule == "epoch-cosine":
        step, start = step - step % plan.steps_per_epoch, 0
    if step < warmup:
        return settings.warmup_lr + (settings.lr - settings.warmup_lr) * step / warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (step - start) / max(1, end - start))
    return settings.final_lr + (settings.lr - settings.final_lr) * (1 + math.cos(math.pi * progress)) / 2
