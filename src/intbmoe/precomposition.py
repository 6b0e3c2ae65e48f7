"""Precomposing whole models: ``intbmoe.precompose(model)``."""

import copy
from functools import cache

import torch
from torch import Tensor, nn

from intbmoe.layer import MoELayer, copy_hooks, moe_layers, require_whole, unwrap
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE

FREQUENCIES = ("inv_freq", "original_inv_freq")
"""transformers' names of the buffers with the frequencies of rotary positions."""
COMPOSED = ("block_weights", "shared", "token_filter", "block_filter")
"""The parts of a composed layer that ``precompose(dtype)`` casts."""


@torch.inference_mode(False)  # its tensors could never be loaded into, nor take part in a backward
def precompose(model: nn.Module, dtype: torch.dtype | None = None, conditioning: Tensor | None = None) -> nn.Module:
    """Return a copy of ``model`` with every IntBMoE replaced by its precomposed form; the pools are not copied.

    If ``dtype`` is given, the whole copy is cast to it, except routers and their state, which decide where tokens go.
    All layers that take a conditioning are composed for the given ``conditioning``.
    """
    model = unwrap(model)
    layers = [module for module in model.modules() if isinstance(module, IntBMoE)]
    if not layers:
        raise ValueError(f"{type(model).__name__} holds no IntBMoE layer, so there is nothing to precompose")
    require_whole(model, "cannot precompose")
    vectors = {id(layer): conditioning if layer.config.conditioning_dim else None for layer in layers}
    memo = {id(layer): layer.precompose(dtype, vectors[id(layer)]) for layer in layers}
    served = copy.deepcopy(model, memo)
    for layer in layers:  # their hooks may be methods of the model or of its connection, which were copied now
        copy_hooks(layer, memo[id(layer)], memo)
    if dtype is not None:
        cast_for_serving(served, dtype)
    return served


def has_one_precomposed_form(model: nn.Module) -> bool:
    """Whether the model's blocks are the same at every call, that is, no layer takes a conditioning."""
    return not any(getattr(layer.config, "conditioning_dim", 0) for _, layer in moe_layers(model))


def cast_for_serving(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast ``model`` in place, except routers and their state, and precomposed layers, which have their types."""
    spared = {id(tensor) for _, layer in moe_layers(model) for tensor in layer.kept_wide()}
    for layer in (module for module in model.modules() if isinstance(module, ComposedMoE)):
        spared |= {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    # Positions times frequencies are large angles; transformers, too, loads half-precision models with float32 ones.
    spared |= {id(buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] in FREQUENCIES}

    @cache  # a buffer of two modules stays one
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and id(tensor) not in spared else tensor

    model._apply(cast)  # the way of ``model.to``, at which hosts clear what they have derived from their weights


def wide_tensors(layer: MoELayer) -> dict[str, Tensor]:
    """The tensors, by name, that a half-precision model keeps in float32.

    They decide where tokens go; of composed layers they are all but the large weights, as in ``precompose(dtype)``.
    """
    kept = {id(tensor) for tensor in layer.kept_wide()}
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    if isinstance(layer, ComposedMoE):
        return {name: tensor for name, tensor in tensors.items() if name.split(".")[0] not in COMPOSED}
    return {name: tensor for name, tensor in tensors.items() if id(tensor) in kept}
