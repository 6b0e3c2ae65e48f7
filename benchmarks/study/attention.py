"""FLOPs of summaries, with attention's score and value products."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from intbmoe.counting import count_flops
from intbmoe.recipes import recipe_from_dict
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import MoESettings, Recipe, TrainSettings

WITH_ATTENTION = 2  # the format of summaries from which on FLOPs have them


def count_attention(summaries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Summaries with attention's products in their FLOPs: those of early ones left them out, equal for all methods."""
    found = []
    for summary in summaries:
        if summary["format"] < WITH_ATTENTION:
            recipe = recipe_from_dict(summary["recipe"])
            more = _attention(replace(recipe, moe=MoESettings("dense", recipe.moe.experts), train=TrainSettings()))
            counts = {name: summary[name] for name in ("flops", "flops_training", "flops_precomposed")}
            summary = summary | {name: value + more for name, value in counts.items() if value is not None}
        found.append(dict(summary))
    return found


_known_attention: list[tuple[Recipe, int]] = []  # of backbones; recipes hold lists and dicts, so they cannot be keys


def _attention(recipe: Recipe) -> int:
    """FLOPs of attention's score and value products, for one example in the recipe's backbone."""
    for known, flops in _known_attention:
        if known == recipe:
            return flops
    task = make_task(recipe)
    _known_attention.append((recipe, count_flops(task.make_model().eval(), *task.example_inputs()).attention))
    return _known_attention[-1][1]
