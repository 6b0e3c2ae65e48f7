"""timm's transforms, also where torchvision was built for another device than torch."""

import importlib
import sys
from types import ModuleType

import torch

_INSTALL = "the 'deit' augmentation needs timm and torchvision: pip install 'intbmoe[images]'"
_schemas: list[torch.library.Library] = []  # a schema lives as long as the library object that defined it


def timm_data() -> ModuleType:
    try:
        import_torchvision()
        return importlib.import_module("timm.data")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{_INSTALL} ({error})", name=error.name) from error


def import_torchvision() -> None:
    """Import torchvision; beside a CPU torch the usual wheel needs help.

    That wheel's compiled half is for CUDA and does not load there, so the operators ``nms`` and ``qnms`` are missing,
    and its Python half, which only annotates them, raises. With their schemas declared the transforms work, which are
    plain Python; calling one of the two operators would still be an error.
    """
    try:
        importlib.import_module("torchvision")
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
