"""From a recipe's ``moe`` settings to the layers that replace a backbone's FFNs."""

from collections.abc import Callable
from typing import Any

from torch import nn

from intbmoe.budget import within_budget
from intbmoe.checks import require
from intbmoe.registry import create, find_method
from intbmoe.tasks.recipe import MoESettings


def ffn_maker(moe: MoESettings, dim: int, hidden: int, **backbone: Any) -> Callable[[], nn.Module] | None:
    """Return a function that makes one layer of the recipe's method under the paper's budget; None for plain "dense".

    With ``moe.options.hidden``, "dense" is a GELU FFN of that width in the place of the mixture. ``backbone`` describes
    the FFN that is replaced, as ``match_budget`` takes it: ``expert``, ``tokens``, ``domain``.
    """
    find_method(moe.name)
    if moe.name == "dense":
        allowed = "empty for the dense model, which has no mixture, or a hidden width, with or without std"
        require(set(moe.options) <= {"hidden", "std"}, "moe.options", moe.options, allowed)
        if not moe.options:
            return None
        require("hidden" in moe.options, "moe.options", moe.options, allowed)
    options = within_budget(moe.name, dim, hidden, moe.options, experts=moe.experts, **backbone)
    return lambda: create(moe.name, dim, **options)
