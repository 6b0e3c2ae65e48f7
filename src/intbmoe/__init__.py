"""IntBMoE and the mixture-of-experts layers it is compared with, behind one interface."""

from importlib import import_module
from os import PathLike
from types import ModuleType
from typing import Any

from torch import nn

from intbmoe.budget import match_budget
from intbmoe.connection import connect
from intbmoe.layer import MoELayer
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE, IntBMoEConfig
from intbmoe.precomposition import precompose
from intbmoe.quantization import quantize
from intbmoe.registry import create, list_methods
from intbmoe.replace import from_pretrained, replace_ffn, save_pretrained
from intbmoe.routing import load_statistics, record_routing
from intbmoe.steps import after_step, aux_loss, before_step, plan_steps
from intbmoe.version import program_version

__all__ = [
    "ComposedMoE", "IntBMoE", "IntBMoEConfig", "MoELayer", "after_step", "aux_loss", "before_step", "connect",
    "create", "from_pretrained", "list_methods", "load", "load_statistics", "match_budget", "plan_steps", "precompose",
    "quantize", "record_routing", "replace_ffn", "save_pretrained",
]  # fmt: skip
# Without "train": ``from intbmoe import *`` would import it, and need the packages of an optional extra.

_COMMANDS = {
    "analyse": "analyse, and in Python intbmoe.analysis.analyse.analyse",
    "compare": "compare, and in Python intbmoe.compare.compare.compare",
    "evaluate": "eval, and in Python intbmoe.train.evaluate",
    "export": "export, and in Python intbmoe.export.export_run",
    "serve": "serve",
}

__version__ = program_version()


def __getattr__(name: str) -> Any:
    if name == "train":
        return _training()
    command = f"; it is a command: intbmoe {_COMMANDS[name]}" if name in _COMMANDS else ""
    raise AttributeError(f"module 'intbmoe' has no attribute {name!r}{command}")


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__version__", "train"]


def load(run: str | PathLike[str]) -> nn.Module:
    """Load the trained model of a finished run directory, or of the zoo ("zoo:digits"), on the CPU in eval mode."""
    return _training().load(run)


def _training() -> ModuleType:
    """Import ``intbmoe.train`` on first use: the packages it needs are an optional extra."""
    try:
        return import_module("intbmoe.train")
    except ModuleNotFoundError as error:
        message = f"training or loading a run needs {error.name}: pip install 'intbmoe[train]'"
        raise ModuleNotFoundError(message, name=error.name) from error
