"""What causal backbones share: which FFN may stand in them, and which tokens a token sees."""

import torch
from torch import Tensor, nn

from intbmoe.layer import MoELayer, moe_layers
from intbmoe.registry import find_method, list_methods


def require_causal(ffn: nn.Module) -> nn.Module:
    """``ffn`` itself; raises if it holds a layer whose outputs depend on later tokens, with the reason."""
    for _, layer in moe_layers(ffn):
        reason = layer.config.noncausal_reason()
        if reason is not None:
            raise ValueError(f"{_method_of(layer)} may not stand in a causal model: {reason}")
    return ffn


def _method_of(layer: MoELayer) -> str:
    """The layer's registered name; its class's where it is not registered.

    Several names may share a class: the layer's is the one with most presets, all of which its Config has.
    """
    methods = [find_method(name) for name in list_methods()]
    fits = [
        method
        for method in methods
        if method.layer is type(layer)
        and all(getattr(layer.config, option) == value for option, value in method.presets.items())
    ]
    if not fits:
        return type(layer).__name__
    method = max(fits, key=lambda method: len(method.presets))
    return f"{method.title} ({method.name!r})"


def apply_ffn(ffn: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, T, d) → (B, T, d); a plain module works token by token and has no use for the mask."""
    return ffn(x, mask) if isinstance(ffn, MoELayer) else ffn(x)


def visible_tokens(mask: Tensor) -> Tensor:
    """(B, T) validity → (B, 1, T, T) bool: a token sees the valid ones up to itself, and always itself.

    Itself even if it is padding: a softmax over nothing would be NaN, which no later mask removes from a gradient.
    """
    tokens = mask.shape[1]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
    itself = torch.eye(tokens, dtype=torch.bool, device=mask.device)
    return ((earlier & mask.unsqueeze(1)) | itself).unsqueeze(1)


def check_mask(mask: Tensor | None, shape: torch.Size) -> None:
    """Raise unless ``mask`` is None or bool of ``shape`` (B, T)."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: expected torch.bool, True where a token is valid (mask.bool())")
    if mask.shape != shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: expected {tuple(shape)}, one entry a token")
