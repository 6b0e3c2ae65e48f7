"""The contract that every MoE method follows.

Letters used throughout: ``B`` sequences, ``T`` tokens each, ``N = B·T``, ``d`` width, ``E`` experts or expert bases,
``K`` blocks, ``k`` chosen for a token.

A method's file defines a Config and a subclass of ``MoELayer`` with ``compute``. The base class checks and reshapes
the input, keeps padding out, and stores a forward's losses and counts in its ``statistics``; ``steps.py`` collects
them for a whole model.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from intbmoe.checks import did_you_mean, require
from intbmoe.graphs.replay import forget, replayed
from intbmoe.precision import autocast_dtype, autocast_off, cast
from intbmoe.settings import Checked, PositiveInt
from intbmoe.statistics import LayerStatistics, Result, Routing

__all__ = [
    "LayerConfig", "MoELayer", "OnePer", "Quantities", "Result", "Routing", "Unit", "copy_hooks", "local", "moe_layers",
    "name_without_wrappers", "require_whole", "unwrap",
]  # fmt: skip


@dataclass(frozen=True)
class LayerConfig(Checked):
    """The options every method has. Subclasses add keyword-only fields, whose annotations say what values they take."""

    dim: PositiveInt
    """d, the width of a token."""
    hidden: PositiveInt
    """Inner width of one expert."""

    def noncausal_reason(self) -> str | None:
        """Why a layer with this Config cannot be used in a causal model; None if it can."""
        return None


Unit = Literal["example", "segment", "token"]


class OnePer(NamedTuple):
    """A materialization that grows with the input: one weight set for each of these units."""

    unit: Unit
    tokens: int | None = None
    """Tokens per segment."""

    def __str__(self) -> str:
        return f"1 per {self.unit}"

    def sets(self, examples: int, tokens: int) -> int:
        """The number of weight sets for ``examples`` sequences of ``tokens`` tokens."""
        per_example = {"example": 1, "segment": -(-tokens // (self.tokens or 1)), "token": tokens}
        return examples * per_example[self.unit]


class Quantities(NamedTuple):
    """The three quantities that a method's definition fixes for one layer; shared experts are left out."""

    participation: int
    """Experts that contribute to one token's output."""
    execution: int
    """Experts (or composed blocks) computed for one token."""
    materialization: int | OnePer
    """Expert-sized weight sets built from experts for an input: none, a fixed number, or one per unit of the input."""

    def sets(self, examples: int, tokens: int) -> int:
        """The materialization for ``examples`` sequences of ``tokens`` tokens, as a number."""
        built = self.materialization
        return built.sets(examples, tokens) if isinstance(built, OnePer) else built


class MoELayer(nn.Module):
    """A mixture-of-experts layer that replaces a Transformer's FFN; ``layer(x, mask)`` returns only the output tensor.

    Build one from its Config, or from the Config's fields: ``Layer(dim, hidden, experts=16)``.
    """

    Config: ClassVar[type[LayerConfig]] = LayerConfig
    KEPT_WIDE: ClassVar[tuple[str, ...]] = ("router",)
    """Attributes that decide where tokens go; a half-precision copy for serving keeps their type (``kept_wide``)."""
    DECAY_GROUPS: ClassVar[Mapping[str, str]] = {"router": "routers"}
    """Attribute → its group in ``train.undecayed``, for parameters not identified by name (bias) or shape."""
    REFUSES: ClassVar[Mapping[str, str]] = {
        "experts": "a token's output needs all of its experts, so there is no single expert to send the token to"
    }
    """Modes of ``train.parallel`` that the method does not support, and why."""
    REPLAYS: ClassVar[bool] = False
    """Whether a GPU may replay forwards from CUDA graphs. Not inherited: a subclass may do what no graph can."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = signature(cls.Config).replace(return_annotation=Parameter.empty)

    def __init__(self, dim: int | LayerConfig, hidden: Any = None, **options: Any) -> None:
        super().__init__()
        if isinstance(dim, self.Config):
            require(hidden is None, "hidden", hidden, "left out when a Config is given")
            require(not options, "options", options, "left out when a Config is given")
            self.config = dim
        else:
            self.config = self.make_config(dim, hidden, **options)
        self.statistics = LayerStatistics()

    @classmethod
    def make_config(cls, dim: int, hidden: Any, **options: Any) -> LayerConfig:
        """Make this method's Config; for an unknown option the error suggests the nearest one."""
        known = [f.name for f in fields(cls.Config)]
        for option in options:
            if option not in known:
                raise TypeError(f"{cls.__name__} has no option {option!r}: {did_you_mean(option, known)}")
        return cls.Config(dim, hidden, **options)

    # To be defined by a method.

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        """Map (B, T, d) tokens and (B, T) validity (None: all valid) to a ``Result``. Masked tokens arrive as zeros.

        Runs with autocast off; ``dtype`` is the type for the large matrix products. A method may take more keywords.
        """
        raise TypeError(f"{type(self).__name__} does not define compute()")

    def quantities(self) -> Quantities:
        raise TypeError(f"{type(self).__name__} does not define quantities()")

    @property
    def choices(self) -> int | None:
        """How many experts or blocks the router chooses from; None for a method that does not choose."""
        return None

    @property
    def open_choices(self) -> Tensor | None:
        """(choices,) bool: which choices are open in a growing pool; None if all are."""
        return None

    @property
    def replay_settings(self) -> tuple | None:
        """What a forward depends on besides tensors and the Config; None if it may not be replayed from a graph."""
        return ()

    def active_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def new_state(self, batch: int) -> Any:
        """Decoding state for ``batch`` sequences; None for a method whose tokens do not need earlier tokens."""
        reason = self.config.noncausal_reason()
        if reason is not None:
            raise ValueError(f"{type(self).__name__} with this configuration cannot decode token by token: {reason}")
        return None

    def start_as(self, module: nn.Module) -> None:
        """Start out equal to ``module``: it becomes the shared expert, and the mixture beside it starts at zero."""
        raise ValueError(f"{type(self).__name__} has no shared expert that the given module could become")

    def plan_steps(self, total: int) -> None:
        """Called once, before training, with the run's number of optimizer steps; turns fractions of it into steps."""

    @classmethod
    def family_before_step(cls, layers: Sequence[Self], optimizer: Any, reevaluate: Any) -> None:
        """Runs after backward, before the optimizer's step, with all layers of this class in a model."""

    @classmethod
    def family_after_step(cls, layers: Sequence[Self], sums: Sequence[dict[str, Tensor]], optimizer: Any) -> None:
        """Runs after the optimizer's step, with each layer's ``sums`` over the step's global batch."""

    def fit_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Called before ``state`` is loaded; the layer's entries start with ``prefix``.

        A layer whose buffer shapes depend on the length of a run adopts the shapes found here, and adds entries to
        ``state`` that runs of earlier versions lack.
        """

    # Common to all methods.

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset parameters and buffers to the values of a layer newly built from this Config.

        This undoes a host's own initialisation, and initialises a layer that was built on the meta device and then
        given memory (``to_empty``), sharded or not: a sharded layer gets the values of the first rank. Random numbers
        are drawn in the constructor's order. Parts that the user has added, which a new layer does not have, stay as
        they are.
        """
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for device in {tensor.device for tensor in own.values()}:
            with torch.device(device):
                fresh = type(self)(self.config)
            values = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
            for name, tensor in own.items():
                if tensor.device == device and name in values and values[name].shape == tensor.shape:
                    _fill(tensor, values[name])

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        forget(self)  # parameters that are moved or cast leave their graphs without a use
        return super()._apply(*arguments, **options)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *arguments: Any) -> None:
        self.fit_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(self, x: Tensor, mask: Tensor | None = None, state: Any = None, **inputs: Any) -> Tensor:
        """Map (…, T, d) tokens and (…, T) bool validity (True: valid) to (…, T, d); masked tokens give zero.

        ``inputs`` are passed on to ``compute``: extra arguments of some methods, such as ``conditioning``.
        """
        y = None
        if state is None and not inputs and not torch.compiler.is_compiling():
            y = replayed(self, x, mask, self._forward)
        return self._forward(x, mask, state, **inputs) if y is None else y

    def _forward(self, x: Tensor, mask: Tensor | None, state: Any = None, **inputs: Any) -> Tensor:
        self._check_input(x, mask)
        tokens = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])  # not −1: there may be no tokens
        if mask is not None:
            mask = mask.reshape(tokens.shape[:-1])
            # Padding may hold anything, NaN included: zero it before any arithmetic sees it.
            tokens = torch.where(mask.unsqueeze(-1), tokens, 0)
        dtype = autocast_dtype(x) or x.dtype
        with autocast_off(x):
            result = self.compute(tokens, mask, state, dtype, **inputs)
        y = result.y
        if mask is not None:
            y = torch.where(mask.unsqueeze(-1), y, 0)
        if self.statistics.wants(self.training):
            count = x.new_full((), tokens.shape[0] * tokens.shape[1], dtype=torch.int64) if mask is None else mask.sum()
            self.statistics.keep(result, count, tuple(x.shape[:-1]), self.training, type(self).__name__)
        return cast(y, x.dtype).reshape(x.shape)

    @property
    def weight_dtype(self) -> torch.dtype:
        """The type the large weights are stored in; outside autocast, inputs must have the same type."""
        experts = getattr(self, "experts", None)  # the router may have another type
        weights = (experts if isinstance(experts, nn.Module) else self).parameters()
        return next(weight.dtype for weight in weights if weight.is_floating_point())  # 8-bit: the type of the scale

    def kept_wide(self) -> Iterator[Tensor]:
        for name in self.KEPT_WIDE:
            part = getattr(self, name, None)
            if isinstance(part, nn.Module):
                yield from part.parameters()
            elif part is not None:
                yield part

    def _check_input(self, x: Tensor, mask: Tensor | None) -> None:
        dim = self.config.dim
        if x.dim() < 2 or x.shape[-1] != dim:
            raise ValueError(f"x has shape {tuple(x.shape)}: expected (…, tokens, dim) with dim={dim}")
        if not x.is_floating_point():
            raise TypeError(f"x is {x.dtype}: expected floating-point numbers, such as {self.weight_dtype}")
        if autocast_dtype(x) is None and x.dtype != self.weight_dtype:
            raise TypeError(
                f"x is {x.dtype} but the layer's weights are {self.weight_dtype}: "
                f"convert one of them, or run under torch.autocast"
            )
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            found = mask.dtype if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise TypeError(f"mask is {found}: expected torch.bool, True where a token is valid (mask.bool())")
        if mask.shape != x.shape[:-1]:
            raise ValueError(f"mask has shape {tuple(mask.shape)}: expected {tuple(x.shape[:-1])} (x without dim)")


def unwrap(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            return model


def _fill(tensor: Tensor, value: Tensor) -> None:
    """Copy ``value``, which is whole, into ``tensor``, which may be a DTensor of any placement."""
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor  # takes a second to import

        value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
    tensor.copy_(value)


def require_whole(model: nn.Module, wanted: str) -> None:
    """Raise if a parameter is sharded (a DTensor), as under FSDP2 and tensor parallelism."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise RuntimeError(
                f"{wanted}: {name} is sharded. Gather first, on all ranks: state = get_model_state_dict(model, "
                f"options=StateDictOptions(full_state_dict=True)) from torch.distributed.checkpoint.state_dict; then "
                f"load the state into a model that is not sharded, and use that model"
            )


HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
"""Where torch keeps what runs around a module's forward."""


def copy_hooks(layer: nn.Module, other: nn.Module, memo: dict[int, Any] | None = None) -> None:
    """Give ``other`` the hooks around the forward of ``layer``; with the ``memo`` of a deep copy, copies of them."""
    for name in HOOKS:
        hooks = getattr(layer, name)
        setattr(other, name, hooks.copy() if memo is None else copy.deepcopy(hooks, memo))


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, all or a slice of it, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor, without importing it


def moe_layers(model: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """Yield every MoE layer of a model with its name as the model's author sees it, without wrappers."""
    for name, module in unwrap(model).named_modules():
        if isinstance(module, MoELayer):
            yield name_without_wrappers(name), module


def name_without_wrappers(name: str) -> str:
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)
