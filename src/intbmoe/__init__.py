"""IntBMoE and the mixture-of-experts layers it is compared with, on one contract."""

from typing import Any

from intbmoe.budget import match_budget
from intbmoe.layer import MoELayer
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE, IntBMoEConfig
from intbmoe.precomposition import precompose
from intbmoe.registry import create, list_methods
from intbmoe.routing import load_statistics, record_routing
from intbmoe.steps import after_step, aux_loss, before_step

__all__ = [
    "ComposedMoE",
    "IntBMoE",
    "IntBMoEConfig",
    "MoELayer",
    "after_step",
    "aux_loss",
    "before_step",
    "create",
    "list_methods",
    "load",
    "load_statistics",
    "match_budget",
    "precompose",
    "record_routing",
]


def __getattr__(name: str) -> Any:
    if name == "load":  # training's packages are an extra: only who loads a run needs them
        from intbmoe.train import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
