"""MoE layers inside somebody else's model: the padding mask reaches them, their losses reach the model's loss.

A host model hands its FFNs the tokens alone, and its trainer knows of one loss. ``connect(model, optimizer)`` closes
both gaps from outside, by hooks, whatever the framework:

    mask     the model's ``attention_mask`` (batch, tokens) goes to every MoE layer that is called without a mask
    loss     a training forward that returns a loss returns it with the layers' auxiliary losses added, unless the
             model has done so itself, which it says by ``collects_aux_loss = True``
    steps    ``before_step`` and ``after_step`` run around the optimizer's step

In a training loop of one's own, ``steps.py`` does the last two and ``layer(x, mask)`` the first: no connection needed.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.layer import MoELayer, moe_layers
from intbmoe.statistics import recomputing
from intbmoe.steps import after_step, aux_loss, before_step

DECODER_MASK = "decoder_attention_mask"
MASKS = ("attention_mask", DECODER_MASK, "padding_mask", "mask")
"""Arguments of a host's forward that may say which tokens are valid: 1 or True for those that are."""


def connect(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> "Connection":
    """Connect ``model``'s MoE layers with the model around them, until ``Connection.remove`` is called.

    A model has one connection: another call, as by a notebook's cell that is run again, takes the place of the first.
    Where a framework makes the optimizer later, pass it then: ``connection.step_with(optimizer)``.
    """
    connection = Connection(model)
    if optimizer is not None:
        connection.step_with(optimizer)
    return connection


class Connection:
    """The hooks of one model; ``connect`` makes one."""

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for _, layer in moe_layers(model)]
        if not layers:
            raise ValueError(f"{type(model).__name__} holds no MoE layer: put them in first (intbmoe.create makes one)")
        for hook in list(model._forward_hooks.values()):
            earlier = getattr(hook, "__self__", None)
            if isinstance(earlier, Connection):  # two would collect the losses twice
                earlier.remove()
        self.model = model
        self._names = list(inspect.signature(model.forward).parameters)
        self._masks: dict[str, Tensor] = {}
        both = DECODER_MASK in self._names  # an encoder and a decoder, each with a mask of its own
        self._of_decoder = {layer for name, layer in moe_layers(model) if both and "decoder" in name.split(".")}
        self._forwards, self._backward = 0, False  # forwards with different masks since the last recomputation
        self._again: Callable[[], Any] | None = None
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        self._hooks += [layer.register_forward_pre_hook(self._give_mask, with_kwargs=True) for layer in layers]

    def step_with(self, optimizer: Any) -> None:
        """Run ``before_step`` and ``after_step`` around ``optimizer.step()``, also of an optimizer inside a wrapper."""
        while (inner := getattr(optimizer, "optimizer", None)) is not None:
            optimizer = inner  # accelerate's wrapper says that it is an Optimizer, but has no hooks
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: expected a torch.optim.Optimizer")
        self._hooks += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda optimizer, *_: after_step(self.model, optimizer)),
        ]

    def remove(self) -> None:
        """Take all hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._masks, self._again = [], {}, None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple, options: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """A closure runs forward and backward inside the step (as Lightning does): then we run at its end."""
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)  # arguments[0] is the optimizer
        if closure is None:
            before_step(self.model, optimizer, self._reevaluate)
            return None

        def and_before_step() -> Any:
            loss = closure()
            before_step(self.model, optimizer, self._reevaluate)
            return loss

        return arguments[:1], {**options, "closure": and_before_step}

    def _before_forward(self, model: nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
        given = {**dict(zip(self._names, arguments, strict=False)), **options}
        found = {name: given[name] for name in MASKS if isinstance(given.get(name), Tensor) and given[name].dim() == 2}
        new = found.keys() != self._masks.keys() or any(found[name] is not self._masks[name] for name in found)
        self._forwards, self._backward = 1 if self._backward else self._forwards + new, False
        self._masks = found
        if model.training:
            self._again = lambda: model(*arguments, **options)

    def _give_mask(self, layer: MoELayer, arguments: tuple, options: dict[str, Any]) -> tuple[tuple, dict] | None:
        if not self._masks or len(arguments) > 1 or options.get("mask") is not None:
            return None
        if recomputing():
            self._backward = True
            if self._forwards > 1:
                raise RuntimeError(
                    "activation checkpointing runs a layer again, but the model has since run with another mask: call "
                    "backward after each forward, or hand the layers their mask yourself"
                )
        mask = self._fitting(arguments[0] if arguments else options["x"], layer)
        return None if mask is None else (arguments, {**options, "mask": mask})

    def _fitting(self, x: Tensor, layer: MoELayer) -> Tensor | None:
        """The mask of the tokens ``x``: of the whole text, or of its last tokens where earlier ones are in a cache."""
        masks = [mask for name, mask in self._masks.items() if (name == DECODER_MASK) == (layer in self._of_decoder)]
        for mask in masks:
            if x.dim() == 3 and x.shape[0] == mask.shape[0] and x.shape[1] <= mask.shape[1]:
                return mask[:, mask.shape[1] - x.shape[1] :].bool()
            if x.dim() == 2 and x.shape[0] == mask.numel():
                return mask.reshape(-1).bool()
        if masks and not torch.compiler.is_compiling():
            warnings.warn(
                f"the model's mask of shape {tuple(masks[0].shape)} does not fit the tokens {tuple(x.shape[:-1])} of a "
                f"{type(layer).__name__}: padding among them counts; hand such a layer its mask yourself",
                stacklevel=2,
            )
        return None

    def _after_forward(self, model: nn.Module, arguments: tuple, options: dict[str, Any], output: Any) -> Any:
        if not (model.training and torch.is_grad_enabled()) or getattr(model, "collects_aux_loss", False):
            return None
        loss = _loss_of(output)
        if loss is None:
            return None  # whoever computes the loss adds intbmoe.aux_loss(model)
        return _with_loss(output, loss + aux_loss(model))

    def _reevaluate(self) -> Tensor:
        """The loss of the last forward once more, as ``before_step`` asks for it."""
        if self._again is None:
            raise RuntimeError("the optimizer stepped before the model ran forward in training mode")
        loss = _loss_of(self._again())
        if loss is None:
            raise RuntimeError("the model returned no loss: give it labels, or call intbmoe.before_step yourself")
        return loss


def _loss_of(output: Any) -> Tensor | None:
    """The loss in what a model returned: the output itself, its field ``loss``, or the first of a tuple."""
    if isinstance(output, tuple) and not hasattr(output, "loss"):
        output = output[0] if output else None
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _with_loss(output: Any, loss: Tensor) -> Any:
    if isinstance(output, Tensor):
        return loss
    if isinstance(output, tuple) and not hasattr(output, "loss"):
        return (loss, *output[1:])
    if isinstance(output, dict):
        output["loss"] = loss
    else:
        output.loss = loss
    return output
