"""IntBMoE and the mixture-of-experts layers it is compared with, on one contract."""

from os import PathLike

from torch import nn

from intbmoe.budget import match_budget
from intbmoe.connection import connect
from intbmoe.layer import MoELayer
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE, IntBMoEConfig
from intbmoe.precomposition import precompose
from intbmoe.quantization import quantize
from intbmoe.registry import create, list_methods
from intbmoe.routing import load_statistics, record_routing
from intbmoe.steps import after_step, aux_loss, before_step, plan_steps
from intbmoe.version import program_version

__all__ = [
    "ComposedMoE", "IntBMoE", "IntBMoEConfig", "MoELayer", "after_step", "aux_loss", "before_step", "connect",
    "create", "list_methods", "load", "load_statistics", "match_budget", "plan_steps", "precompose", "quantize",
    "record_routing",
]  # fmt: skip

__version__ = program_version()


def load(run: str | PathLike[str]) -> nn.Module:
    """The trained model of a finished run directory, on the CPU and in evaluation mode."""
    try:
        from intbmoe.train import load as load_run  # training's packages are an extra: only who loads a run needs them
    except ModuleNotFoundError as error:
        message = f"loading a run needs {error.name}, which comes with training: pip install 'intbmoe[train]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return load_run(run)
