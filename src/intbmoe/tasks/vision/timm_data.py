"""timm's transforms, even if torchvision was built for another device than torch."""

import importlib
from types import ModuleType

from intbmoe.foreign import import_torchvision

_INSTALL = "the 'deit' augmentation needs timm and torchvision: pip install 'intbmoe[images]'"


def timm_data() -> ModuleType:
    try:
        import_torchvision()
        return importlib.import_module("timm.data")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{_INSTALL} ({error})", name=error.name) from error
