"""Which ways of sharing a model out over ranks it has: ``train.parallel`` and ``intbmoe plan`` ask here."""

from typing import Literal, get_args

from torch import nn

from intbmoe.layer import moe_layers
from intbmoe.parallel.pool import why_not_shared

Way = Literal["ddp", "fsdp", "pools", "experts"]
WAYS: tuple[Way, ...] = get_args(Way)


def refusals(model: nn.Module) -> dict[Way, str]:
    """The ways that the model cannot be trained in, and why."""
    layers = [layer for _, layer in moe_layers(model)]
    why = {way: f"{type(layer).__name__}: {reason}" for layer in layers for way, reason in layer.REFUSES.items()}
    if not layers:
        why["experts"] = f"{type(model).__name__} holds no MoE layer"
    elif any("experts" not in layer.REFUSES for layer in layers):  # others beside them stay whole
        why.pop("experts", None)
    pools = why_not_shared(model)
    return why if pools is None else {**why, "pools": pools}
