"""Pools of experts that grow and shrink in training.

All slots are allocated at once, so that the optimizer, DDP and a compiled graph see fixed parameters; a mask says
which are open. Every parameter of such a layer is stacked, slot by slot, along its first dimension.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from intbmoe.layer import local
from intbmoe.parts.experts import ChoosingLayer, ExpertsConfig
from intbmoe.parts.state import WideBuffers
from intbmoe.settings import AtMost, PositiveInt


@dataclass(frozen=True, kw_only=True)
class PoolConfig(ExpertsConfig):
    """A pool: ``experts`` is the number of slots, the most experts there can ever be."""

    initial_experts: Annotated[PositiveInt | None, AtMost("experts")] = None
    """Slots open at the start, the first ones; None for half of them, rounded down (8 of 17)."""

    @property
    def start(self) -> int:
        return max(1, self.experts // 2) if self.initial_experts is None else self.initial_experts


class PoolLayer(WideBuffers, ChoosingLayer):
    """A layer with slots: the mask ``active`` and the mean number of experts a token uses, ``mean_choices``."""

    REFUSES: ClassVar = {"fsdp": "it opens and closes experts by single rows of its parameters, which it needs whole"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.experts = self.config.make_experts()
        self.register_buffer("active", torch.arange(self.config.experts) < self.config.start)
        self.register_buffer("mean_choices", torch.tensor(self._expected_choices(), dtype=torch.float32))

    def _expected_choices(self) -> float:
        """Experts a token uses before training, until a step has measured it."""
        raise TypeError(f"{type(self).__name__} does not define _expected_choices()")

    def _measure_choices(self, choices: Tensor, tokens: Tensor) -> None:
        """Set ``mean_choices`` from a step's global counts; a step without tokens changes nothing."""
        mean = (choices / tokens.clamp(min=1)).to(self.mean_choices.dtype)
        self.mean_choices.copy_(torch.where(tokens > 0, mean, self.mean_choices))

    @property
    def executed(self) -> float:
        """The mean of the last training step: the number of experts varies from token to token."""
        return self._expected_choices() if self.mean_choices.is_meta else float(self.mean_choices)

    @property
    def open_choices(self) -> Tensor:
        return self.active

    def _require_whole_slots(self) -> None:
        """Raise if a parameter is sharded: slots are opened by writing single rows, which may lie on another rank.

        Experts that ranks share out whole are slots still, each on one rank.
        """
        apart = {} if self.experts.exchange is None else set(self.experts.parameters())
        for name, parameter in self.named_parameters():
            if hasattr(parameter, "full_tensor") and parameter not in apart:  # a DTensor, without importing it
                raise RuntimeError(
                    f"{type(self).__name__} opens and closes experts by rows of {name!r}, which is sharded: train it "
                    f"with DistributedDataParallel, or keep its parameters out of FSDP2 by ignored_params"
                )


def reset_moments(optimizer: Any, parameters: Iterable[Tensor], slots: Tensor, own: slice = slice(None)) -> None:
    """Zero the optimizer's memory of ``slots``, (E,) bool: what a slot held before says nothing of what it holds now.

    ``own`` are the slots of which this rank holds the parameters. Every state tensor of a parameter's own shape (Adam's
    moments, SGD's momentum) loses those rows. Others stay: the step count is the whole parameter's, and a factored
    second moment cannot be told apart by slot.
    """
    if optimizer is None:
        return
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                local(value)[slots[own]] = 0


def unit(x: Tensor) -> Tensor:
    """``x`` (…, d) scaled to length 1; a zero vector stays zero, with a finite gradient."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1)
