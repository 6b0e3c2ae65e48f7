"""AdamW, which parameters it decays, and the learning rate of each step."""

import math

import torch
from torch import nn

from intbmoe.layer import moe_layers
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train.data import BatchPlan

ROUTING_PARAMETERS = frozenset({"router", "codebook", "phi", "embeddings", "gate"})
"""An MoE layer's attributes that decide where tokens go; ``experts.gate`` is a SwiGLU expert's matrix, and decays."""


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
