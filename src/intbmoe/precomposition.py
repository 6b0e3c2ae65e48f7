"""Precomposing whole models: ``intbmoe.precompose(model)``."""

import copy

import torch
from torch import nn

from intbmoe.layer import unwrap
from intbmoe.methods.intbmoe import IntBMoE


def precompose(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of ``model`` with every IntBMoE replaced by its precomposed form; the pools are not copied.

    With a ``dtype`` the whole copy is cast to it, routers excepted.
    """
    model = unwrap(model)
    layers = [module for module in model.modules() if isinstance(module, IntBMoE)]
    if not layers:
        raise ValueError(f"{type(model).__name__} holds no IntBMoE layer, so there is nothing to precompose")
    composed = {id(layer): layer.precompose(dtype) for layer in layers}
    inside = {id(module) for layer in composed.values() for module in layer.modules()}
    served = copy.deepcopy(model, memo=dict(composed))
    for module in served.modules():
        if dtype is not None and id(module) not in inside:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
    return served
