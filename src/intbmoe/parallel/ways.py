"""Which modes of parallel training a model supports, for ``train.parallel`` and ``intbmoe plan``."""

from typing import Literal, get_args

from torch import nn

from intbmoe.layer import moe_layers
from intbmoe.parallel.pool import why_not_shared

Way = Literal["ddp", "fsdp", "pools", "experts"]
WAYS: tuple[Way, ...] = get_args(Way)


def refusals(model: nn.Module) -> dict[Way, str]:
    """The modes in which the model cannot be trained, and why."""
    layers = [layer for _, layer in moe_layers(model)]
    why = {way: f"{type(layer).__name__}: {reason}" for layer in layers for way, reason in layer.REFUSES.items()}
    if not layers:
        why["experts"] = f"{type(model).__name__} holds no MoE layer"
    elif any("experts" not in layer.REFUSES for layer in layers):  # the other layers stay whole
        why.pop("experts", None)
    pools = why_not_shared(model)
    return why if pools is None else {**why, "pools": pools}
