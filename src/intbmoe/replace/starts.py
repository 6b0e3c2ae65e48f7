"""How a mixture is initialised when it replaces a trained FFN.

    shared    the FFN stays as the shared expert, and the mixture beside it starts at zero: nothing changes
    copy      every expert starts as a copy of the FFN ("sparse upcycling", Komatsuzaki et al., ICLR 2023)
    fresh     the layer keeps its usual initialisation; what the FFN had learned is lost

A copy changes nothing if the weights of a token's experts sum to one. If they do not (Switch, V-MoE, ReMoE, …), the
last map of every expert is divided by their mean sum, measured on tokens; He et al. ("Upcycling Large Language Models
into Mixture of Experts", 2024) scale by a constant. Equal experts diverge only because the router sends them different
tokens; with ``redraw`` each expert draws a fraction of its inner units again, with the mean and deviation of the copied
ones (Drop-Upcycling, Nakamura et al., ICLR 2025).
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.layer import MoELayer
from intbmoe.parts.experts import FFNExperts, StackedExperts, StackedLinear, SwiGLUExperts
from intbmoe.precision import cast
from intbmoe.registry import find_method, list_methods
from intbmoe.replace.find import FFN, matrix
from intbmoe.routing import record_routing

Start = Literal["shared", "copy", "fresh"]
STARTS = ("shared", "copy", "fresh")

SAME = 1e-9
"""How much an expert may differ from the FFN it copies, in float64 and relative to the largest output."""
SCALED_FROM = 1e-3
"""Weights whose mean sum is closer to one than this are not scaled."""


class Started(NamedTuple):
    layer: MoELayer
    keeps_ffn: bool
    scale: float


def start_layer(
    method: str, ffn: FFN, start: Start, tokens: Tensor, redraw: float, options: Mapping[str, Any]
) -> Started:
    """Make the layer that replaces ``ffn``, on its device and in its type."""
    chosen = {"hidden": ffn.hidden, **options}
    if start != "copy":
        found = find_method(method)
        layer = make_layer(found.layer, ffn, found.config(ffn.dim, chosen.pop("hidden"), **chosen))
        if start == "shared":
            _require_shared(method, layer)
            layer.start_as(ffn.module)
        return Started(layer, start == "shared", 1.0)
    if chosen["hidden"] != ffn.hidden:
        raise ValueError(
            f"hidden={chosen['hidden']} is not allowed with start='copy': {ffn.name} is copied with its own width "
            f"({ffn.hidden})"
        )
    expert, parts = _as_expert(ffn, tokens)
    layer = make_layer(find_method(method).layer, ffn, _copy_config(method, ffn, expert, chosen))
    if not _takes_copies(layer):
        raise _not_copies(method)
    _fill(layer.experts, parts, redraw)
    return Started(layer, False, _scale(layer, tokens))


def _with_shared() -> str:
    """The methods that have a shared expert."""
    return ", ".join(name for name in list_methods() if _has_shared(name))


def _has_shared(method: str) -> bool:
    return find_method(method).layer.start_as is not MoELayer.start_as


def _require_shared(method: str, layer: MoELayer) -> None:
    if not _has_shared(method):
        fresh = "start='fresh', which drops the FFN"
        own = f"start='copy', which copies it into all experts, {fresh}" if _takes_copies(layer) else fresh
        raise ValueError(
            f"{method} has no shared expert that the FFN could become: use {own}, or a method with a shared expert "
            f"({_with_shared()})"
        )


def _takes_copies(layer: MoELayer) -> bool:
    """Whether every expert is an FFN with its own maps."""
    experts = getattr(layer, "experts", None)
    stacks = isinstance(experts, FFNExperts | SwiGLUExperts)
    return stacks and all(isinstance(part, StackedLinear) for part in experts.children())


def _not_copies(method: str) -> ValueError:
    keep = "start='shared', which keeps the FFN"
    keep = keep if _has_shared(method) else f"{keep}, with a method that has a shared expert ({_with_shared()})"
    return ValueError(
        f"{method} cannot start as a copy of an FFN: its experts are not independent FFNs; use start='fresh', or {keep}"
    )


def make_layer(kind: type[MoELayer], ffn: FFN, config: Any) -> MoELayer:
    """Make a layer on the device and in the type of ``ffn``; in half precision, routers stay in float32."""
    weight = ffn.maps[-1].weight
    with torch.device(weight.device):
        layer = kind(config)
    spared = {id(tensor) for tensor in layer.kept_wide()} if weight.dtype.itemsize < 4 else set()
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point() and id(tensor) not in spared:
            tensor.data = cast(tensor.data, weight.dtype)
    return layer


def _copy_config(method: str, ffn: FFN, expert: str, options: dict[str, Any]) -> Any:
    """The method's Config with experts like ``ffn`` and without an additional shared expert."""
    found = find_method(method)
    plain = found.config(ffn.dim, options.pop("hidden"), **options)
    if not hasattr(plain, "expert"):
        raise _not_copies(method)
    if options.get("expert", expert) != expert:
        raise ValueError(f"expert={options['expert']!r} is not allowed: {ffn.name} is a {expert} network")
    changes = {"expert": expert}
    if hasattr(plain, "shared_experts") and "shared_experts" not in options:
        changes["shared_experts"] = 0
    try:
        return replace(plain, **changes)
    except ValueError as error:
        raise ValueError(f"{ffn.name} cannot be copied into {method}: {error}") from error


def _as_expert(ffn: FFN, tokens: Tensor) -> tuple[str, dict[str, tuple[Tensor, Tensor | None]]]:
    """The kind of expert that computes what ``ffn`` computes, and (matrix, bias) of each of its maps."""
    with torch.no_grad():
        wanted = copy.deepcopy(ffn.module).eval().double()(tokens.double())
        for expert, parts in _readings(ffn):
            network = _network(expert, {name: [_double(part) for part in map_] for name, map_ in parts.items()})
            if (network(tokens.double()) - wanted).abs().max() <= SAME * wanted.abs().max():
                return expert, parts
    raise ValueError(
        f"{ffn.name} ({type(ffn.module).__name__}) cannot be copied: experts can only be GELU networks (exact, not "
        f"tanh) or SwiGLU without biases; any FFN can be kept with start='shared' ({_with_shared()}) or dropped with "
        f"start='fresh'"
    )


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def _readings(ffn: FFN) -> Iterator[tuple[str, dict[str, tuple[Tensor, Tensor | None]]]]:
    """The possible roles of the maps: of two with the same shape, either may be the gate."""
    biases = [getattr(part, "bias", None) for part in ffn.maps]
    matrices = [matrix(part) for part in ffn.maps]
    if ffn.form == "plain":
        yield "gelu", dict(zip(("up", "down"), zip(matrices, biases, strict=True), strict=True))
        return
    if any(bias is not None and bias.any() for bias in biases):
        return  # SwiGLU experts have no biases
    first = matrices[0].chunk(2, dim=1) if ffn.form == "fused" else matrices[:2]
    for gate, up in (first, first[::-1]):
        yield "swiglu", {"gate": (gate, None), "up": (up, None), "down": (matrices[-1], None)}


def _network(expert: str, maps: Mapping[str, Any]) -> Any:
    def apply(name: str, x: Tensor) -> Tensor:
        weight, bias = maps[name]
        return x @ weight if bias is None else x @ weight + bias

    if expert == "gelu":
        return lambda x: apply("down", F.gelu(apply("up", x)))
    return lambda x: apply("down", F.silu(apply("gate", x)) * apply("up", x))


@torch.no_grad()
def _fill(experts: StackedExperts, parts: Mapping[str, tuple[Tensor, Tensor | None]], redraw: float) -> None:
    for name, (weight, bias) in parts.items():
        stack: StackedLinear = getattr(experts, name)
        stack.weight.copy_(weight.expand_as(stack.weight))
        if stack.bias is not None:
            stack.bias.copy_(torch.zeros_like(stack.bias) if bias is None else bias.expand_as(stack.bias))
    hidden = experts.down.weight.shape[1]
    for expert in range(experts.count if redraw else 0):
        units = torch.randperm(hidden, device=experts.down.weight.device)[: round(redraw * hidden)]
        for name, stack in experts.named_children():
            across = stack.weight[expert] if name == "down" else stack.weight[expert].T  # (hidden, d), a view
            drawn = torch.randn_like(across[units]) * across.std() + across.mean()
            across[units] = drawn


@torch.no_grad()
def _scale(layer: MoELayer, tokens: Tensor) -> float:
    """Divide the experts' last map by the mean sum of a token's weights; return the factor."""
    layer.eval()
    with record_routing(nn.ModuleDict({"layer": layer})) as log:
        layer(tokens)
    weights = [entry.weights for entry in log.values() if entry.weights is not None]
    total = float(weights[0].sum(-1).mean()) if weights else 1.0
    if total <= 0 or abs(total - 1) < SCALED_FROM:
        return 1.0
    for parameter in layer.experts.down.parameters():
        parameter /= total
    return 1 / total
