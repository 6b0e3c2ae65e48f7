"""Connect MoE layers with a host model: pass them its padding mask, and add their losses to its loss.

A host model passes only tokens to its FFNs, and its trainer knows only one loss. ``connect(model, optimizer)`` closes
both gaps from outside, with hooks that work in any framework:

    mask     the model's ``attention_mask`` (batch, tokens), True or 1 for a token that counts, goes to every MoE layer
             that is called without a mask and gets as many tokens as the model, so not to the patches of its images
    loss     a training forward that returns a loss returns it with the layers' auxiliary losses added, unless the
             model adds them itself and says so with ``collects_aux_loss = True``
    steps    ``before_step`` and ``after_step`` run around the optimizer's step

Your own training loop needs no connection: call ``layer(x, mask)`` and the functions of ``steps.py``.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.checks import did_you_mean, require
from intbmoe.layer import MoELayer, moe_layers, unwrap
from intbmoe.models.causal import generates, require_causal
from intbmoe.statistics import recomputing
from intbmoe.steps import after_step, aux_loss, before_step

DECODER_MASK = "decoder_attention_mask"
MASKS = ("attention_mask", DECODER_MASK)
"""Arguments whose meaning is agreed: True or 1 marks a token that counts. Others, such as ``padding_mask``, mark what
counts in one model and what does not in the next, so ``connect`` takes them only if it is told to."""


def connect(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, mask: str | None = None
) -> "Connection":
    """Connect ``model``'s MoE layers with the model around them, until ``Connection.remove`` is called.

    A model has one connection: calling this again, for example by rerunning a notebook cell, replaces the first one.
    If the framework creates the optimizer later, pass it then: ``connection.step_with(optimizer)``.

    ``mask`` names the argument of the model's forward that holds its mask, if that is not ``attention_mask``: bool or
    integers of shape (batch, tokens), True or 1 for a token that counts.
    """
    connection = Connection(model, mask)
    if optimizer is not None:
        connection.step_with(optimizer)
    return connection


class Connection:
    """The hooks of one model; ``connect`` makes one."""

    def __init__(self, model: nn.Module, mask: str | None = None) -> None:
        model = unwrap(model)  # what it passes on reaches the model itself, which is what copies and saves hold
        layers = dict(moe_layers(model))
        if not layers:
            raise ValueError(f"{type(model).__name__} holds no MoE layer: put one in first (intbmoe.create makes it)")
        for name, layer in layers.items():
            if generates(model, name):
                require_causal(layer)
        arguments = _arguments(model)
        self._names = list(arguments)
        self._mask_names = MASKS if mask is None else (mask,)
        any_name = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
        wanted = f"an argument of {type(model).__name__}.forward: {did_you_mean(str(mask), self._names)}"
        known = isinstance(mask, str) and (any_name or mask in self._names)
        require(mask is None or known, "mask", mask, wanted)
        for hook in list(model._forward_hooks.values()):
            earlier = getattr(hook, "__self__", None)
            if isinstance(earlier, Connection):  # two would collect the losses twice
                earlier.remove()
        self.model = model
        self._masks: dict[str, Tensor] = {}
        self._inside, self._lengths = False, set()  # whether the model is running, and how many tokens it was given
        self._forwards, self._backward = 0, False  # forwards with different masks since the last recomputation
        self._again: Callable[[], Any] | None = None
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),  # after errors, too
        ]
        both = mask is None and DECODER_MASK in self._names  # an encoder and a decoder, each with its own mask
        for name, layer in layers.items():
            give = partial(self._give_mask, both and "decoder" in name.split("."))
            self._hooks.append(layer.register_forward_pre_hook(give, with_kwargs=True))

    def step_with(self, optimizer: Any) -> None:
        """Run ``before_step`` and ``after_step`` around ``optimizer.step()``; the optimizer may be wrapped."""
        while (inner := getattr(optimizer, "optimizer", None)) is not None:
            optimizer = inner  # accelerate's wrapper claims to be an Optimizer, but has no hooks
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: expected a torch.optim.Optimizer")
        own = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            warnings.warn(  # no error, because it may hold flat copies of them, as sharding optimizers do
                f"this {type(optimizer).__name__} holds no parameter of the {type(self.model).__name__}: connect the "
                f"optimizer that trains it, or its MoE layers miss their updates",
                stacklevel=3,
            )
        self._hooks += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._masks, self._again = [], {}, None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple, options: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Run ``before_step`` now, or after the backward if the step runs a closure (as in Lightning)."""
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)  # arguments[0] is the optimizer
        if closure is None:
            before_step(self.model, optimizer, self._reevaluate)
            return None

        def and_before_step() -> Any:
            loss = closure()
            before_step(self.model, optimizer, self._reevaluate)
            return loss

        return arguments[:1], {**options, "closure": and_before_step}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        after_step(self.model, optimizer)

    def _before_forward(self, model: nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
        given = {**dict(zip(self._names, arguments, strict=False)), **options}
        found = {name: given[name] for name in self._mask_names if self._holds_mask(name, given.get(name))}
        new = found.keys() != self._masks.keys() or any(found[name] is not self._masks[name] for name in found)
        self._forwards, self._backward = 1 if self._backward else self._forwards + new, False
        self._masks, self._inside = found, True
        others = (value for name, value in given.items() if name not in (*self._mask_names, "labels"))
        texts = (value for value in others if isinstance(value, Tensor))
        self._lengths = {text.shape[1] for text in texts if text.dim() in (2, 3)}
        if model.training:
            self._again = lambda: model(*arguments, **options)

    def _holds_mask(self, name: str, value: Any) -> bool:
        """Whether an argument says of each token if it counts; an expanded mask says which tokens see each other."""
        if not isinstance(value, Tensor):
            return False
        whole = not (value.is_floating_point() or value.is_complex())
        if value.dim() == 2 and whole:
            return True
        found = f"{name} is {value.dtype} of shape {tuple(value.shape)}"
        if name not in MASKS:
            raise TypeError(f"{found}: expected bool or integers (batch, tokens), True or 1 for a token that counts")
        if value.dim() == 2 and not torch.compiler.is_compiling():  # 0 could mean that a token counts
            warnings.warn(
                f"{found}, so the MoE layers do not get it and treat padding as tokens: make it bool or integers, True "
                f"or 1 for a token that counts",
                stacklevel=2,
            )
        return False

    def _give_mask(
        self, of_decoder: bool, layer: MoELayer, arguments: tuple, options: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        if not self._masks or len(arguments) > 1 or options.get("mask") is not None:
            return None
        if not (self._inside or recomputing()):
            return None  # called by itself: the mask is of an earlier forward
        if recomputing():
            self._backward = True
            if self._forwards > 1:
                raise RuntimeError(
                    "activation checkpointing reruns a layer, but the model has run with another mask since: call "
                    "backward after each forward, or pass the layers their mask yourself"
                )
        mask = self._fitting(arguments[0] if arguments else options["x"], layer, of_decoder)
        return None if mask is None else (arguments, {**options, "mask": mask})

    def _fitting(self, x: Tensor, layer: MoELayer, of_decoder: bool) -> Tensor | None:
        """The mask for the tokens ``x``: the whole text's, or its last entries if earlier tokens are in a cache.

        Other lengths are not the text's: an image's patches, or frames of audio whose mask counts samples.
        """
        masks = [mask for name, mask in self._masks.items() if (name == DECODER_MASK) == of_decoder]
        for mask in masks:
            known = x.dim() == 3 and x.shape[1] <= mask.shape[1] and x.shape[1] in {mask.shape[1], *self._lengths}
            if known and x.shape[0] == mask.shape[0]:
                return mask[:, mask.shape[1] - x.shape[1] :].bool()
            if x.dim() == 2 and x.shape[0] == mask.numel():
                return mask.reshape(-1).bool()
        if masks and not torch.compiler.is_compiling():
            warnings.warn(
                f"the model's mask of shape {tuple(masks[0].shape)} does not fit the tokens {tuple(x.shape[:-1])} of a "
                f"{type(layer).__name__}, which now treats padding as tokens: pass this layer its mask yourself",
                stacklevel=2,
            )
        return None

    def _after_forward(self, model: nn.Module, arguments: tuple, options: dict[str, Any], output: Any) -> Any:
        self._inside = False
        if not (model.training and torch.is_grad_enabled()) or getattr(model, "collects_aux_loss", False):
            return None
        loss = _loss_of(output)
        if loss is None:
            return None  # the caller computes the loss, and must add intbmoe.aux_loss(model)
        return _with_loss(output, loss + aux_loss(model))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_again": None, "_masks": {}}  # a function of the last forward cannot be saved

    def _reevaluate(self) -> Tensor:
        """Recompute the loss of the last forward, for ``before_step``."""
        if self._again is None:
            raise RuntimeError("the optimizer stepped before any forward in training mode: run the model first")
        loss = _loss_of(self._again())
        if loss is None:
            raise RuntimeError("the model returned no loss: give it labels, or call intbmoe.before_step yourself")
        return loss


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The arguments of a model's forward; of a wrapper that passes on any, those of the model in it."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    while True:
        parameters = inspect.signature(model.forward).parameters
        inner = (getattr(model, name, None) for name in ("module", "_orig_mod", "base_model", "model"))
        inside = next((module for module in inner if isinstance(module, nn.Module) and module is not model), None)
        if inside is None or any(parameter.kind not in variable for parameter in parameters.values()):
            return parameters
        model = inside


def _loss_of(output: Any) -> Tensor | None:
    """The loss in a model's output: the output itself, its field ``loss``, or the first item of a tuple."""
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
    elif isinstance(output, tuple):
        return output._replace(loss=loss)
    else:
        output.loss = loss
    return output
