"""Adds attention's score and value products to the FLOPs of summaries."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from intbmoe.counting import count_flops
from intbmoe.recipes import recipe_from_dict
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import MoESettings, Recipe, TrainSettings

WITH_ATTENTION = 2  # the first format of summaries whose FLOPs include them


def count_attention(summaries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Adds attention's products to the FLOPs of early summaries, which left them out equally for all methods."""
    found = []
    for summary in summaries:
        if summary["format"] < WITH_ATTENTION:
            recipe = recipe_from_dict(summary["recipe"])
            more = _attention(replace(recipe, moe=MoESettings("dense", recipe.moe.experts), train=TrainSettings()))
            counts = {name: summary[name] for name in ("flops", "flops_training", "flops_precomposed")}
            summary = summary | {name: value + more for name, value in counts.items() if value is not None}
        found.append(dict(summary))
    return found


_known_attention: list[tuple[Recipe, int]] = []  # by backbone; recipes contain lists and dicts, so cannot be keys


def _attention(recipe: Recipe) -> int:
    """Counts the FLOPs of attention's score and value products, for one example in the recipe's backbone."""
    for known, flops in _known_attention:
        if known == recipe:
            return flops
    task = make_task(recipe)
    _known_attention.append((recipe, count_flops(task.make_model().eval(), *task.example_inputs()).attention))
    return _known_attention[-1][1]
