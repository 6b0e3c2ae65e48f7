"""Which type a model answers in."""

import torch
from torch import nn


def narrowest_type(model: nn.Module) -> torch.dtype:
    """That of its large weights: routers and the like may be kept in a wider one."""
    return min({parameter.dtype for parameter in model.parameters()}, key=lambda dtype: torch.finfo(dtype).bits)
