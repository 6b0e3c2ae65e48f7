"""Measure the cost of one forward by running it: FLOPs with torch's counter, bytes by following live tensors.

Neither needs actual values: a model too large for this machine is built and run under torch's ``FakeTensorMode``, where
every operation works on shapes and types alone. Only the number of experts per token must then be given.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from intbmoe.layer import MoELayer, OnePer, Unit, moe_layers
from intbmoe.methods.intbmoe import BlockLayer, ComposedMoE
from intbmoe.methods.mumoe import MuMoE
from intbmoe.parts.experts import StackedExperts
from intbmoe.routing import RecordedRouting, record_routing

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION = (
    _CPU_ATTENTION,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
)
_GROUPED = torch.ops.intbmoe.grouped_mm


@dataclass(frozen=True)
class Flops:
    """2 × multiply-adds of linear maps, convolutions and matrix products; norms and activations count 0."""

    executed: int  # everything that ran except attention's score and value products
    attention: int  # attention's score and value products
    formulation: int  # what the papers' formulation needs in addition, see ``formulation_difference``

    def total(self, attention: bool = False) -> int:
        """FLOPs in the papers' formulation, with or without attention's products."""
        return self.executed + self.formulation + (self.attention if attention else 0)


class Shares(NamedTuple):
    """``layer.quantities()`` averaged over a model's layers; a plain FFN is one expert that every token uses."""

    participation: float
    execution: float
    materialization: float  # weight sets that one layer builds for the inputs
    materialization_per: Unit | None  # the unit that their number grows with; None if the number is fixed

    def materialization_text(self) -> str:
        unit = self.materialization_per
        return f"{self.materialization:g}" if unit is None else str(OnePer(unit))


class Counts(NamedTuple):
    params: int
    activated: int
    flops: int
    flops_executed: int


def count(
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    set_aside: int = 0,
    active: float | None = None,
    attention: bool = False,
) -> Counts:
    """Run ``model`` once on a batch of one and count; no routed token uses the ``set_aside`` parameters."""
    flops = count_flops(model, *inputs, active=active)
    params = _parameters(model)
    idle = sum(_idle_parameters(layer, active) for _, layer in moe_layers(model))
    total = flops.total(attention)
    return Counts(params, params - set_aside - idle, total, total - flops.formulation)


def shares_of(model: nn.Module, inputs: tuple[Any, ...], active: float | None = None) -> Shares:
    """The model's ``Shares`` on ``inputs``; pass ``active`` if the trained router decides the number of experts."""
    found = {layer: layer.quantities() for _, layer in moe_layers(model)}
    if not found:
        return Shares(1, 1, 0, None)
    units = [q.materialization.unit for q in found.values() if isinstance(q.materialization, OnePer)]
    sizes = _token_shapes(model, inputs) if units else dict.fromkeys(found, (1, 1))
    sets = fmean(found[layer].sets(prod(shape[:-1]), shape[-1]) for layer, shape in sizes.items())
    means = [fmean(getattr(q, name) for q in found.values()) for name in ("participation", "execution")]
    return Shares(*(means if active is None else [active, active]), sets, units[0] if units else None)


def _token_shapes(model: nn.Module, inputs: tuple[Any, ...]) -> dict[nn.Module, tuple[int, ...]]:
    """Run the model and return the shape (…, T) of each MoE layer's input."""
    shapes: dict[nn.Module, tuple[int, ...]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, args, named: shapes.update({layer: tuple((args[0] if args else named["x"]).shape[:-1])}),
            with_kwargs=True,
        )
        for _, layer in moe_layers(model)
    ]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _idle_parameters(layer: MoELayer, active: float | None) -> int:
    """Parameters of ``layer`` that one token does not use, assuming ``active`` experts per token if given."""
    if active is None:
        return _parameters(layer) - layer.active_parameters()
    stacks = [module for module in layer.modules() if isinstance(module, StackedExperts)]
    return sum(round((experts.count - active) * experts.expert_parameters()) for experts in stacks)


def count_flops(model: nn.Module, *inputs: Tensor, active: float | None = None, **named: Tensor) -> Flops:
    """Run ``model(*inputs, **named)`` once, without gradients, and count its FLOPs.

    ``active`` is for methods whose router decides how many experts a token gets. An untrained router's number means
    nothing, so the experts' FLOPs are scaled from the assignments it made to ``active`` per token.
    """
    layers = dict(moe_layers(model))
    if any(layer.weight_dtype == torch.float64 for layer in layers.values()):
        raise ValueError("float64 layers compute in tiles, whose padding would be counted: count model.float() instead")
    formulas = {_CPU_ATTENTION: _attention_formula, _GROUPED: _grouped_formula(scaled=active is not None)}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with record_routing(model) if layers else nullcontext({}) as log, torch.no_grad(), counter:
        model(*inputs, **named)
    by_op = dict(counter.get_flop_counts().get("Global", {}))
    attention = sum(by_op.pop(op, 0) for op in _ATTENTION)
    if active is not None:
        by_op[_GROUPED] = round(by_op[_GROUPED] * active / _mean_active(log))
    formulation = sum(formulation_difference(layers[name], prod(record.shape)) for name, record in log.items())
    return Flops(sum(by_op.values()), attention, formulation)


def _mean_active(log: dict[str, RecordedRouting]) -> float:
    """The mean number of experts that ran per token; with fake tensors, all choices are assumed to have run."""
    choices = [record.ids for record in log.values()]
    assigned = sum(ids.numel() if isinstance(ids, FakeTensor) else int((ids >= 0).sum()) for ids in choices)
    if not assigned:
        raise ValueError("the router activated no expert, so the cost of one assignment is unknown")
    return assigned / sum(len(ids) for ids in choices)


def _attention_formula(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the CPU's fused attention, for which torch has no formula and would count nothing."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _grouped_formula(scaled: bool) -> Callable[..., int]:
    def formula(x: Tensor, weight: Tensor, offsets: Tensor, complete: bool, **_: Any) -> int:
        # Rows after the last group belong to no expert and are not computed. Fake tensors do not say where the last
        # group ends, so all rows count and the result must be ``scaled`` afterwards.
        unknown = not complete and isinstance(offsets, FakeTensor)
        if unknown and not scaled:
            raise ValueError("how many experts run depends on values, which fake tensors do not hold: pass `active`")
        rows = x.shape[0] if complete or unknown else int(offsets[-1])
        return 2 * rows * weight.shape[1] * weight.shape[2]

    formula._get_raw = True
    return formula


# Tells the counter that the formula wants the tensors, not just their shapes.
_attention_formula._get_raw = True


def formulation_difference(layer: MoELayer, tokens: int) -> int:
    """FLOPs that the paper's formulation of a layer needs beyond what ours executes on ``tokens`` tokens.

    This is the only place where a count is corrected. For two methods we compute a map in an equivalent, cheaper form:

    IntBMoE   the paper has W_f[x ‖ c] for each chosen block; ours is W_x x once per token and W_c c once per block (the
              latter not at all in a precomposed layer)
    μMoE      the paper has the bias as a last input row, multiplied by an appended 1; ours adds it

    Both forms of the map are run under the counter, on tensors without storage.
    """
    if isinstance(layer, BlockLayer) and layer.config.filter:
        c = layer.config
        written = _product(tokens * c.top_k, c.dim + c.code_width, c.dim)
        once_per_block = 0 if isinstance(layer, ComposedMoE) else _product(c.blocks, c.code_width, c.dim)
        return written - _product(tokens, c.dim, c.dim) - once_per_block
    if isinstance(layer, MuMoE):
        return sum(_product(tokens, 1, part.inputs[0].numel()) for part in (layer.first, layer.second))
    return 0


def _product(rows: int, inputs: int, outputs: int) -> int:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        F.linear(torch.empty(rows, inputs), torch.empty(outputs, inputs))
    return counter.get_total_flops()


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations create, and subtracts them as they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary()

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        weakref.finalize(storage, self._free, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out


def peak_memory(model: nn.Module, *inputs: Any) -> int:
    """Peak bytes of one forward without gradients: parameters, buffers, inputs and all tensors alive at once.

    It is measured by following every operation's outputs from creation to release, so it is the same on every machine.
    A kernel's own scratch space (cuBLAS keeps some MiB on a GPU) and the allocator's rounding are not included.
    """
    meter = _LiveBytes()
    for tensor in (*model.parameters(), *model.buffers(), *tree_leaves(inputs)):
        meter.add(tensor)
    with torch.no_grad(), meter:
        model(*inputs)
    return meter.peak
