"""Other people's packages, where importing them takes more than the word."""

import importlib
import sys
from types import ModuleType

import torch

_schemas: list[torch.library.Library] = []  # a schema lives as long as the library object that defined it


def import_extra(module: str, purpose: str, extra: str) -> ModuleType:
    """The module; where it is missing, the error says what needs it and which extra of this package brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = f"{purpose} needs {module.split('.')[0]}: pip install 'intbmoe[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def import_torchvision(required: bool = True) -> None:
    """Import torchvision; beside a CPU torch the usual wheel needs help.

    That wheel's compiled half is for CUDA and does not load there, so the operators ``nms`` and ``qnms`` are missing,
    and its Python half, which only annotates them, raises. With their schemas declared the transforms work, which are
    plain Python; calling one of the two operators would still be an error. timm and transformers import torchvision
    where it is there: call this first. Without ``required`` it need not be there.
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
