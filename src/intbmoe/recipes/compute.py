"""Models with as much compute as IntBMoE: wider dense layers, and sparse ones with more experts per token.

At equal parameters IntBMoE runs more FLOPs than most baselines. These variants match its FLOPs instead, whatever their
parameters:

dense, swiglu     a GELU or a SwiGLU FFN in the layers where IntBMoE has mixtures, of a width that comes within
                  ``TOLERANCE``; the backbone's own may be either
vmoe, deepseek    the nearest k; one step is a whole expert, so they can be a few per cent off
remoe             the k that its controller aims for, counted as if it held from the start: at first more are active
expert_choice     its capacity factor, the mean number of experts per token (images only: it looks ahead)

Switch has k = 1 by definition, and with more it would be V-MoE; in DynMoE and MASS the trained router decides.

The forward of one training example is matched. IntBMoE composes its blocks once per forward, for all examples in it. At
the batch size 1 of the paper's cost tables that is a large share, at a training batch almost nothing. So the count here
is the cost of one more example, plus the fixed cost of a forward divided by the recipe's batch size. Everything is
counted by running models, not by formulas.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.counting import count_flops
from intbmoe.registry import find_method
from intbmoe.tasks import find_task, make_task
from intbmoe.tasks.recipe import MoESettings, Recipe

TOLERANCE = 0.02
WIDTH_STEP = 16
"""Widths are multiples of this, which GPUs multiply fastest, unless the model is too small for such steps."""
FIRST_WIDTHS = (256, 512)


def equal_compute(recipe: Recipe, intbmoe: MoESettings) -> list[tuple[str, MoESettings]]:
    """Titles and settings of the variants that match the compute of ``intbmoe`` in the recipe's model."""
    target = _flops(recipe, intbmoe)
    options = {"vmoe": "top_k", "deepseek": "top_k", "remoe": "top_k"}
    if not find_task(recipe.task).causal:
        options["expert_choice"] = "capacity_factor"
    more = [_with_more_experts(recipe, name, option, target) for name, option in options.items()]
    return _dense(recipe, target) + more


def dense_of_compute(recipe: Recipe, intbmoe: MoESettings) -> list[tuple[str, MoESettings]]:
    """The dense variants of ``equal_compute``."""
    return _dense(recipe, _flops(recipe, intbmoe))


def training_flops(
    model: nn.Module, inputs: tuple[Any, ...], batch: int, active: float | None = None, *, attention: bool = False
) -> float:
    """FLOPs of the forward of one example in a batch of ``batch``, with or without attention's products.

    ``inputs`` are those of a batch of one. A forward has FLOPs per example and FLOPs that occur once (IntBMoE composes
    blocks), so runs with batches of one and two determine both. ``active`` is as in ``count_flops``.
    """
    batches = ([_repeat(value, size) for value in inputs] for size in (1, 2))
    counts = [count_flops(model, *repeated, active=active) for repeated in batches]
    one, two = (found.total(attention) for found in counts)
    example = two - one
    return example + (one - example) / batch


def _repeat(value: Any, size: int) -> Any:
    """Repeat the tensors of a batch of one, also in a dict (the travel model's), to a batch of ``size``."""
    if isinstance(value, Tensor):
        return value.repeat(size, *[1] * (value.dim() - 1))
    if isinstance(value, Mapping):
        return {name: _repeat(part, size) for name, part in value.items()}
    return value


def _flops(recipe: Recipe, moe: MoESettings) -> float:
    task = make_task(replace(recipe, moe=moe))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = task.make_model().eval()
    active = moe.options["top_k"] if moe.name == "remoe" else None
    return training_flops(model, task.example_inputs(), recipe.train.device_batch or recipe.train.batch, active)


def _solve(recipe: Recipe, moe: MoESettings, option: str, first: tuple[int, int], target: float) -> float:
    """Find the value of ``option`` at which the FLOPs, which are linear in it, are ``target``."""
    low, high = (_flops(recipe, replace(moe, options={option: value})) for value in first)
    require(high > low, option, first, "an option that changes the model's FLOPs")
    return first[0] + (target - low) * (first[1] - first[0]) / (high - low)


def _dense(recipe: Recipe, target: float) -> list[tuple[str, MoESettings]]:
    return [_widened(recipe, name, target) for name in ("dense", "swiglu")]


def _widened(recipe: Recipe, name: str, target: float) -> tuple[str, MoESettings]:
    moe = MoESettings(name, recipe.moe.experts, label=f"{name}-wide")
    solved = _solve(recipe, moe, "hidden", FIRST_WIDTHS, target)
    for step in (WIDTH_STEP, 1):
        width = max(1, round(solved / step) * step)
        widened = replace(moe, options={"hidden": width})
        difference = _flops(recipe, widened) / target - 1
        if abs(difference) <= TOLERANCE:
            return f"Dense {'GELU' if name == 'dense' else 'SwiGLU'}, width {width}", widened
    raise ValueError(
        f"no width of {name} comes within {TOLERANCE:.0%} of IntBMoE's FLOPs: {width} is {difference:+.1%}"
    )


def _with_more_experts(recipe: Recipe, name: str, option: str, target: float) -> tuple[str, MoESettings]:
    most = recipe.moe.experts + (0 if name == "deepseek" else 1)  # match_budget's numbers of routed experts
    kind = int if option == "top_k" else float
    moe = MoESettings(name, recipe.moe.experts, label=f"{name}-more")
    solved = math.floor(_solve(recipe, moe, option, (1, most), target)) if most > 1 else 1
    candidates = {kind(min(most, max(1, k))) for k in (solved, solved + 1)}
    variants = [replace(moe, options={option: value}) for value in sorted(candidates)]
    nearest = min(variants, key=lambda variant: abs(_flops(recipe, variant) - target))
    symbol = "k" if option == "top_k" else "capacity"
    return f"{find_method(name).title}, {symbol} = {nearest.options[option]:g}", nearest
