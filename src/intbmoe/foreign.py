"""Import third-party packages that need more than an import statement."""

import importlib
import sys
from types import ModuleType

import torch

_schemas: list[torch.library.Library] = []  # a schema lives as long as the library object that defined it


def import_extra(module: str, purpose: str, extra: str) -> ModuleType:
    """Import a module; if it is missing, the error says what needs it and which extra of this package installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = f"{purpose} needs {module.split('.')[0]}: pip install 'intbmoe[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def import_torchvision(required: bool = True) -> None:
    """Import torchvision, and repair the import if a CUDA build of it is installed next to a CPU build of torch.

    The compiled part of such a wheel does not load, so the operators ``nms`` and ``qnms`` are missing, and the Python
    part, which only annotates them, raises. Once their schemas are declared, the transforms work, as they are plain
    Python; calling either operator is still an error. timm and transformers import torchvision if it is installed, so
    call this before importing them. With ``required=False``, torchvision may be missing.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        if required:
            raise
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # what the failed import left behind
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _schemas.append(library)
        importlib.import_module("torchvision")


def torchvision_is_repaired() -> bool:
    """Whether ``import_torchvision`` had to repair the import, so that other programs cannot import torchvision."""
    return bool(_schemas)
