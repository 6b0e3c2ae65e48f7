"""The functions a training loop calls on a whole model: ``plan_steps``, ``aux_loss``, ``before_step``, ``after_step``.

intbmoe.plan_steps(model, total_steps)                   # once, before the first step
loss = task_loss(model(x)) + intbmoe.aux_loss(model)     # once per micro-batch
loss.backward()
intbmoe.before_step(model, optimizer)
optimizer.step()
intbmoe.after_step(model, optimizer)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from intbmoe.checks import require_positive_int
from intbmoe.layer import MoELayer, moe_layers


def plan_steps(model: nn.Module, total: int) -> None:
    """Tell every layer how many optimizer steps the run has; call once, before training and before wrapping in DDP.

    MASS and DynMoE change their pools only during part of the run. A layer that has started training keeps its plan.
    """
    require_positive_int("total", total)
    for _, layer in moe_layers(model):
        layer.plan_steps(total)


def aux_loss(model: nn.Module) -> Tensor:
    """The sum of all layers' auxiliary losses for the last forward; call once per micro-batch, before backward.

    Also adds the layers' load counts to the step's counts, which ``after_step`` uses. Layers in eval mode are skipped,
    and so, in a single process, are layers that the forward skipped while it ran others (LayerDrop, unused branches).
    """
    layers = list(moe_layers(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} holds no MoE layer, so it has no auxiliary loss")
    total = torch.zeros((), device=next(layers[0][1].parameters()).device)
    training = {name: layer for name, layer in layers if layer.training}
    ran = {name: layer for name, layer in training.items() if layer.statistics.record is not None}
    if len(ran) < len(training) and _all_must_run(ran):
        name = next(name for name in training if name not in ran)
        raise RuntimeError(
            f"{_called(name, training[name])} has no record of a training forward: it did not run since the last "
            f"aux_loss(model). Either the forward skipped it{_ALONE if ran else ''}, the model was not in training "
            f"mode, or aux_loss was already called (intbmoe.connect calls it for models that return a loss)"
        )
    for name, layer in ran.items():
        record = layer.statistics.take_record()
        if record.losses and torch.is_grad_enabled() and not record.differentiable:
            raise RuntimeError(
                f"the losses of {_called(name, layer)} carry no gradient: its forward ran under no_grad, as reentrant "
                f"activation checkpointing does; use checkpoint(…, use_reentrant=False)"
            )
        for loss in record.losses.values():
            total = total + loss.to(total.device)
        layer.statistics.add(record.sums)
    return total


def before_step(model: nn.Module, optimizer: Any, reevaluate: Callable[[], Tensor] | None = None) -> None:
    """Call after backward and before ``optimizer.step()``; ``reevaluate`` recomputes the last batch's loss."""
    for family, layers in _families(model):
        family.family_before_step(layers, optimizer, reevaluate)


def after_step(model: nn.Module, optimizer: Any = None) -> None:
    """Call after ``optimizer.step()``: updates the state that has no gradients, from the step's global counts."""
    training = {name: layer for name, layer in moe_layers(model) if layer.training}
    ran = {name: layer for name, layer in training.items() if layer.statistics.pending}
    missing = {name: layer for name, layer in training.items() if name not in ran and (ran or _needs_counts(layer))}
    if missing and _all_must_run(ran):
        name, layer = next(iter(missing.items()))
        raise RuntimeError(
            f"{_called(name, layer)} has no counts for this step: no training forward whose losses were collected "
            f"since the last step. Add intbmoe.aux_loss(model) to the loss of each micro-batch (a connected model that "
            f"returns a loss does so itself), and run a forward before every step"
        )
    if not ran:
        return
    _all_reduce([layer.statistics.pending for layer in ran.values()])
    for family, members in _families(model):
        if members := [layer for layer in members if layer.statistics.pending]:
            family.family_after_step(members, [layer.statistics.pending for layer in members], optimizer)
    for layer in ran.values():
        layer.statistics.end_step()


_ALONE = " (which only a single process allows)"


def _all_must_run(ran: Mapping[str, MoELayer]) -> bool:
    """Whether a layer that did not run is an error: if none did, or if ranks, which add up counts, could differ."""
    return not ran or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def moves_state(layer: MoELayer) -> bool:
    """Whether the method does anything before or after an optimizer step."""
    hooks = ("family_before_step", "family_after_step")
    return any(getattr(type(layer), hook).__func__ is not getattr(MoELayer, hook).__func__ for hook in hooks)


def _needs_counts(layer: MoELayer) -> bool:
    """Whether a step without the layer's counts is a mistake: its state stood still, or its losses were forgotten."""
    record = layer.statistics.record
    return moves_state(layer) or (record is not None and bool(record.losses))


def _called(name: str, layer: MoELayer) -> str:
    return f"layer {name!r}" if name else type(layer).__name__  # a model that is itself a layer has no name


def _families(model: nn.Module) -> Iterable[tuple[type[MoELayer], list[MoELayer]]]:
    """The model's layers in training mode, by class, so that a method with one state per model sees all its layers."""
    families: dict[type[MoELayer], list[MoELayer]] = {}
    for _, layer in moe_layers(model):
        if layer.training:
            families.setdefault(type(layer), []).append(layer)
    return sorted(families.items(), key=lambda family: f"{family[0].__module__}.{family[0].__qualname__}")


def _all_reduce(sums: list[dict[str, Tensor]]) -> None:
    """Replace local sums by their totals over all ranks, in one message. Float64 represents every count exactly."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    entries = [(entry, key) for entry in sums for key in sorted(entry)]
    device = next((entry[key].device for entry, key in entries if entry[key].device.type != "cpu"), "cpu")
    message = torch.cat([entry[key].to(device, torch.float64).reshape(-1) for entry, key in entries])
    dist.all_reduce(message)
    parts = message.split([entry[key].numel() for entry, key in entries])
    for (entry, key), part in zip(entries, parts, strict=True):
        entry[key] = part.view(entry[key].shape).to(entry[key].device, entry[key].dtype)
