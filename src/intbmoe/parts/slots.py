"""Pools of experts that grow and shrink during training.

All slots are allocated at once, so that the optimizer, DDP and a compiled graph see fixed parameters; a mask says
which slots are open. The first dimension of every parameter of such a layer is the slot.
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
    """Options of a pool: ``experts`` is the number of slots, and so the largest possible number of experts."""

    initial_experts: Annotated[PositiveInt | None, AtMost("experts")] = None
    """Slots open at the start; None for half of them, rounded down (8 of 17)."""

    @property
    def start(self) -> int:
        return max(1, self.experts // 2) if self.initial_experts is None else self.initial_experts


class PoolLayer(WideBuffers, ChoosingLayer):
    """A layer with slots: ``active`` masks the open ones, ``mean_choices`` is the mean number of experts per token."""

    REFUSES: ClassVar = {"fsdp": "it opens and closes experts by writing single rows of its unsharded parameters"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.experts = self.config.make_experts()
        self.register_buffer("active", torch.arange(self.config.experts) < self.config.start)
        self.register_buffer("mean_choices", torch.tensor(self._expected_choices(), dtype=torch.float32))

    def _expected_choices(self) -> float:
        """The number of experts per token to assume until a training step has measured it."""
        raise TypeError(f"{type(self).__name__} does not define _expected_choices()")

    def _measure_choices(self, choices: Tensor, tokens: Tensor) -> None:
        """Set ``mean_choices`` from a step's global counts; a step without tokens changes nothing."""
        mean = (choices / tokens.clamp(min=1)).to(self.mean_choices.dtype)
        self.mean_choices.copy_(torch.where(tokens > 0, mean, self.mean_choices))

    @property
    def executed(self) -> float:
        """The mean in the last training step, since the number of experts varies from token to token."""
        return self._expected_choices() if self.mean_choices.is_meta else float(self.mean_choices)

    @property
    def open_choices(self) -> Tensor:
        return self.active

    def _require_whole_slots(self) -> None:
        """Raise if a parameter is sharded: slots are opened by writing single rows, which may be on another rank.

        Expert parallelism is fine: each slot is whole on one rank.
        """
        apart = {} if self.experts.exchange is None else set(self.experts.parameters())
        for name, parameter in self.named_parameters():
            if hasattr(parameter, "full_tensor") and parameter not in apart:  # a DTensor, without importing it
                raise RuntimeError(
                    f"{type(self).__name__} opens and closes experts by writing rows of {name!r}, which is sharded: "
                    f"train it with DistributedDataParallel, or keep its parameters out of FSDP2 with ignored_params"
                )


def reset_moments(optimizer: Any, parameters: Iterable[Tensor], slots: Tensor, own: slice = slice(None)) -> None:
    """Zero the optimizer's state of ``slots``, (E,) bool, because it belongs to the slots' previous contents.

    ``own`` are the slots whose parameters this rank holds. The slots' rows are zeroed in every state tensor that has
    its parameter's shape (Adam's moments, SGD's momentum). Other state stays: the step count belongs to the whole
    parameter, and a factored second moment has no rows per slot.
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
