"""The three quantities of every method at the paper's budget on images, as compared in its Figure 1.

``intbmoe methods`` prints them, and draws them on request.
"""

from dataclasses import dataclass, fields

import torch

from intbmoe.analysis.settings import IMAGENET
from intbmoe.budget import match_budget
from intbmoe.layer import OnePer, Quantities
from intbmoe.models.vit import ViTConfig
from intbmoe.registry import Method, method_family

TOKENS = ViTConfig().patches
BATCH = 64
"""The batch size for which the picture counts weight sets, besides those of one image."""


@dataclass(frozen=True)
class MethodQuantities:
    """One method at the paper's E = 16; numbers that depend on a trained router are those of the cost table."""

    name: str
    title: str
    family: str
    participation: float
    execution: float
    materialization: int | str  # a number, or what it grows with: "1 per token"
    sets_of_one: int  # weight sets built for one image
    sets_of_batch: int  # weight sets built for ``BATCH`` images
    decided_by_router: bool


def quantities_of(method: Method) -> MethodQuantities:
    """The quantities of a layer in the paper's image model, built on the meta device."""
    found = _layer_quantities(method)
    built, active = found.materialization, IMAGENET.active.get(method.name)
    return MethodQuantities(
        method.name,
        method.title,
        method_family(method.name),
        found.participation if active is None else active,
        found.execution if active is None else active,
        str(built) if isinstance(built, OnePer) else built,
        found.sets(1, TOKENS),
        found.sets(BATCH, TOKENS),
        method.dynamic,
    )


def _layer_quantities(method: Method) -> Quantities:
    config = ViTConfig()
    budget = match_budget(method.name, config.dim, config.hidden, experts=IMAGENET.experts, tokens=TOKENS)
    known = {f.name for f in fields(method.layer.Config)}  # a method from another package may have no experts
    options = {name: value for name, value in budget.items() if name in known}
    with torch.device("meta"):
        return method.layer(method.config(config.dim, **options)).quantities()
