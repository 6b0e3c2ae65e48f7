"""Building a training: from a task to its data, model, optimizer (with its learning rate) and stepper."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from intbmoe.layer import moe_layers, unwrap
from intbmoe.precision import bfloat16_is_slow
from intbmoe.tasks.base import Examples, Task
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train.data import BatchPlan, derive_seed, plan_batches
from intbmoe.train.distribution import Ranks
from intbmoe.train.step import Stepper

ROUTING_PARAMETERS = frozenset({"router", "codebook", "phi", "embeddings", "gate"})
"""An MoE layer's attributes that decide where tokens go; ``experts.gate`` is a SwiGLU expert's matrix, and decays."""


class Built(NamedTuple):
    examples: Examples  # of the training split
    plan: BatchPlan
    model: nn.Module  # on this rank's device, compiled, replicated or sharded as the recipe and the launcher say
    optimizer: torch.optim.Optimizer
    stepper: Stepper


def build(task: Task, ranks: Ranks) -> Built:
    """Everything that follows from the task's recipe; the weights follow from its seed."""
    settings = task.recipe.train
    examples = task.split("train")
    plan = plan_batches(len(examples), settings, ranks.world)
    torch.manual_seed(derive_seed(settings.seed, "model"))
    model = ranks.place(task.make_model().train(), settings)
    optimizer = make_optimizer(unwrap(model), settings)
    return Built(examples, plan, model, optimizer, Stepper(task, model, optimizer, ranks, settings))


def doubts(settings: TrainSettings, plan: BatchPlan, device: torch.device) -> Iterator[str]:
    """Warnings about settings that are allowed but hardly intended."""
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


def spared_from_decay(model: nn.Module) -> set[str]:
    """Names of norms, biases (those of stacked experts have two dimensions), scales, thresholds and routing."""
    spared = {name for name, value in model.named_parameters() if value.dim() <= 1 or name.rpartition(".")[2] == "bias"}
    for prefix, layer in moe_layers(model):
        for name, _ in layer.named_parameters():
            if name.partition(".")[0] in ROUTING_PARAMETERS:
                spared.add(f"{prefix}.{name}" if prefix else name)
    return spared


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW that decays every parameter (``decay_all``), or has a second group of parameters that it does not decay."""
    spared = set() if settings.decay_all else spared_from_decay(model)
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if name in spared else decayed).append(parameter)
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def learning_rate(step: int, settings: TrainSettings, plan: BatchPlan) -> float:
    """Of step ``step``, from 0: a line up to ``lr``, then constant or half a cosine, at ``final_lr`` after the end."""
    warmup = round(settings.warmup * plan.steps_per_epoch)
    if step < warmup:
        return settings.warmup_lr + (settings.lr - settings.warmup_lr) * step / warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = (step - warmup) / max(1, plan.steps - warmup)
    return settings.final_lr + (settings.lr - settings.final_lr) * (1 + math.cos(math.pi * progress)) / 2
