"""IntBMoE and the mixture-of-experts layers it is compared with, on one contract."""

from intbmoe.budget import match_budget
from intbmoe.layer import MoELayer
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE, IntBMoEConfig, precompose
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
    "load_statistics",
    "match_budget",
    "precompose",
    "record_routing",
]
