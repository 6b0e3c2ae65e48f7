"""8-bit weights for serving: ``intbmoe.quantize(model, "int8")`` stores large weights in a quarter of the memory.

Only weights are quantised: tokens keep their type, and a weight is dequantised where it is used
(``parts/quantized.py``); on a CPU the compiled library reads int8 blocks and experts as they are stored. Routers are
not quantised, so routing does not change.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from intbmoe.checks import require, some
from intbmoe.layer import moe_layers, require_whole, unwrap
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE
from intbmoe.parts.experts import StackedLinear
from intbmoe.parts.linear import Linear
from intbmoe.parts.quantized import Quantized, Storage, store

ROUTING = "decides where tokens go"
EMBEDDING = "embedding, or tied to one"
SHARED = "used in several places"
SMALL = "vector, or too small to gain"
OTHER = "not the weight of a linear map"


@dataclass(frozen=True)
class QuantizationReport:
    """What was quantised and what was not: every parameter and buffer of the model is listed under one of the two."""

    storage: Storage
    quantized: dict[str, tuple[int, int]]
    """Name → bytes before and after, scales included."""
    kept: dict[str, tuple[str, int]]
    """Name → why it was not quantised, and its bytes."""

    @property
    def bytes_before(self) -> int:
        return sum(before for before, _ in self.quantized.values()) + self._bytes_kept

    @property
    def bytes_after(self) -> int:
        return sum(after for _, after in self.quantized.values()) + self._bytes_kept

    @property
    def _bytes_kept(self) -> int:
        return sum(size for _, size in self.kept.values())

    def describe(self) -> dict[str, Any]:
        """The report as plain data, which ``lines_of`` turns into text."""
        kept: dict[str, dict[str, Any]] = {}
        for name, (reason, size) in self.kept.items():
            entry = kept.setdefault(reason, {"bytes": 0, "names": []})
            entry["bytes"] += size
            entry["names"].append(name)
        sizes = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return {"storage": self.storage, **sizes, "quantized": list(self.quantized), "kept": kept}

    def __str__(self) -> str:
        return "\n".join(lines_of(self.describe()))


def lines_of(description: Mapping[str, Any]) -> list[str]:
    """Say what was quantised and what was not, with one line per reason."""
    before, after, count = (description[key] for key in ("bytes_before", "bytes_after", "quantized"))
    lines = [f"{description['storage']}: {len(count)} tensors, {before:,} → {after:,} bytes ({after / before:.1%})"]
    for reason, kept in description["kept"].items():
        lines.append(f"not quantised, {kept['bytes']:,} bytes: {reason} ({some(kept['names'], 3)})")
    return lines


@torch.no_grad()
def quantize(model: nn.Module, storage: Storage = "int8") -> QuantizationReport:
    """Store the weights of every linear map of ``model`` in 8 bits, in place, and report what was and was not.

    Linear maps are the blocks of precomposed layers, the experts of other methods, and every ``nn.Linear`` around them.
    Cast the model first: ``precompose(model, torch.bfloat16)`` gives a model that computes in bfloat16. Quantised
    weights can no longer be trained. ``save_pretrained`` refuses to save them; a ``state_dict`` can be saved.
    """
    require(storage in get_args(Storage), "storage", storage, f"one of {', '.join(get_args(Storage))}")
    model = unwrap(model)
    pools = [name for name, layer in moe_layers(model) if isinstance(layer, IntBMoE)]
    if pools:
        raise ValueError(f"{pools[0] or 'the model'} composes blocks at every call: use quantize(precompose(model))")
    if is_quantized(model):
        raise ValueError(f"{type(model).__name__} is already quantised: start from the original model")
    require_whole(model, "cannot quantise")
    reasons = _reasons_to_keep(model)
    wanted = {name: (owner, key) for name, owner, key, weight in _weights(model) if id(weight) not in reasons}
    if not wanted:
        raise ValueError(f"{type(model).__name__} has no linear map whose weight could be quantised")
    names = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in wanted:
        if names[name].device.type != "meta" and not names[name].isfinite().all():
            raise ValueError(
                f"{name} holds values that are not finite: 8 bits cannot store them, and the model is broken"
            )
    kept = {
        name: (reasons.get(id(tensor), SMALL if tensor.dim() < 2 else OTHER), tensor.nbytes)
        for name, tensor in names.items()
        if name not in wanted
    }
    quantized = {}
    for name, (owner, key) in wanted.items():
        before = names[name].nbytes
        names[name].requires_grad_(False)
        store(owner, key, storage)
        stored = owner.parametrizations[key]
        quantized[name] = before, stored.original0.nbytes + stored.original1.nbytes
    for module in model.modules():
        if hasattr(module, "save_pretrained"):
            module.save_pretrained = refuse_to_save  # no from_pretrained knows the 8-bit weights that it would write
    return QuantizationReport(storage, quantized, kept)


def refuse_to_save(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "the model is quantised by intbmoe.quantize, and from_pretrained could not load its 8-bit weights: save the "
        "model before quantising it, and quantise it again after loading"
    )


def is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, Quantized) for module in model.modules())


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Name, owner, attribute and tensor of every weight of a linear map; its inputs are dimension 1."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, ComposedMoE):
            for key, weight in module.block_weights._parameters.items():
                yield f"{dot}block_weights.{key}", module.block_weights, key, weight
            if module._parameters.get("token_filter") is not None:
                yield f"{dot}token_filter", module, "token_filter", module.token_filter
        elif isinstance(module, nn.Linear | Linear | StackedLinear) and "weight" in module._parameters:
            yield f"{dot}weight", module, "weight", module.weight


def _reasons_to_keep(model: nn.Module) -> dict[int, str]:
    """Tensor id → why the tensor is not quantised even though it may be the weight of a linear map."""
    reasons = {id(tensor): ROUTING for _, layer in moe_layers(model) for tensor in layer.kept_wide()}
    tables = (nn.Embedding, nn.EmbeddingBag)
    reasons |= {id(module.weight): EMBEDDING for module in model.modules() if isinstance(module, tables)}
    seen: set[int] = set()
    for _, _, _, weight in _weights(model):
        if id(weight) in seen:
            reasons.setdefault(id(weight), SHARED)
        seen.add(id(weight))
        after = weight.numel() + weight.numel() // weight.shape[1] * weight.element_size()
        if after >= weight.nbytes or not weight.is_floating_point():
            reasons.setdefault(id(weight), SMALL)
    return reasons
