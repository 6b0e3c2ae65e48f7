"""Common to causal backbones: which FFNs they accept, and which tokens a token sees."""

from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.layer import MoELayer, moe_layers
from intbmoe.registry import method_of


def generates(model: nn.Module, name: str) -> bool:
    """Whether the part ``name`` of a Hugging Face model has a share in generating text, token by token."""
    return getattr(model, "can_generate", lambda: False)() and "encoder" not in name.split(".")


def require_causal(ffn: nn.Module) -> nn.Module:
    """Return ``ffn``; raise, with the reason, if it holds a layer whose outputs depend on later tokens."""
    for _, layer in moe_layers(ffn):
        reason = layer.config.noncausal_reason()
        if reason is not None:
            raise ValueError(f"{_method_of(layer)} cannot be used in a causal model: {reason}")
    return ffn


def _method_of(layer: MoELayer) -> str:
    method = method_of(layer)
    return type(layer).__name__ if method is None else f"{method.title} ({method.name!r})"


def apply_ffn(ffn: nn.Module, x: Tensor, mask: Tensor | None, state: Any = None, **inputs: Any) -> Tensor:
    """(B, T, d) → (B, T, d); a plain module works token by token and needs neither mask nor state."""
    return ffn(x, mask, state, **inputs) if isinstance(ffn, MoELayer) else ffn(x)


def new_ffn_state(ffn: nn.Module, batch: int) -> Any:
    """The decoding state of ``ffn`` for ``batch`` sequences; None if tokens do not need earlier ones.

    Raises for a plain module around a mixture that needs a state, because the module would not pass it on.
    """
    if isinstance(ffn, MoELayer):
        return ffn.new_state(batch)
    for name, layer in moe_layers(ffn):
        if layer.new_state(batch) is not None:
            raise ValueError(
                f"{type(ffn).__name__} holds {_method_of(layer)} as {name!r}, which needs a state to decode: use the "
                f"mixture itself as the FFN, because a module around it does not pass the state on"
            )
    return None


def remembers(model: nn.Module) -> bool:
    """Whether a mixture in the model needs a decoding state, besides the one of attention."""
    return any(layer.new_state(1) is not None for _, layer in moe_layers(model))


def visible_tokens(mask: Tensor, queries: int | None = None) -> Tensor:
    """(B, S) validity → (B, 1, S, S) bool: a token sees the valid tokens up to itself, and always itself.

    Even padding sees itself: a softmax over nothing would be NaN, which no later mask removes from a gradient. With
    ``queries``, only the rows of the last ``queries`` tokens are returned.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    own = places if queries is None else places[mask.shape[1] - queries :]
    earlier, itself = places <= own.unsqueeze(1), places == own.unsqueeze(1)
    return ((earlier & mask.unsqueeze(1)) | itself).unsqueeze(1)


def check_mask(mask: Tensor | None, shape: torch.Size) -> None:
    """Raise unless ``mask`` is None or bool of ``shape`` (B, T)."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: expected torch.bool, True where a token is valid (mask.bool())")
    if mask.shape != shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: expected {tuple(shape)}, one entry per token")
