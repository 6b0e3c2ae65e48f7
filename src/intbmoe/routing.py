"""See where tokens go: ``record_routing`` for single forwards, ``load_statistics`` for a training window."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from intbmoe.layer import moe_layers
from intbmoe.statistics import LoadStatistics, RoutedForward, load_statistics_of


class RecordedRouting:
    """What one layer's router decided while ``record_routing`` was on, one forward after another."""

    def __init__(self, calls: list[RoutedForward], choices: int | None, opened: Tensor | None) -> None:
        self._calls = calls
        self._opened = opened
        self.choices = choices
        """How many experts or blocks there were to choose from; None for a method that does not choose."""

    @property
    def ids(self) -> Tensor | None:
        """(N, k_max) chosen experts or blocks, −1 for none; None for a method that does not choose."""
        return self._joined("ids", -1)

    @property
    def weights(self) -> Tensor | None:
        return self._joined("weights", 0)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The (…, T) of each forward: N is the sum of their products."""
        return tuple(call.shape for call in self._calls)

    @property
    def shape(self) -> tuple[int, ...]:
        """The (…, T) of the one forward that was recorded."""
        if len(self._calls) != 1:
            raise ValueError(f"{len(self._calls)} forwards were recorded: use .shapes")
        return self._calls[0].shape

    @property
    def tokens(self) -> int:
        """Valid tokens of all forwards: the N rows without padding."""
        return sum(int(call.count) for call in self._calls)

    def load_statistics(self) -> LoadStatistics:
        """How evenly the recorded tokens used the experts or blocks."""
        if self.ids is None or self.choices is None:
            raise ValueError("this method does not choose experts, so it has no load")
        chosen = self.ids[self.ids >= 0]
        counts = torch.bincount(chosen, minlength=self.choices)
        return load_statistics_of(counts, self.tokens, self.dropped or 0, self._opened, self._summed("untaken"))

    @property
    def dropped(self) -> int | None:
        """Assignments that found their expert full; None for a method that never drops any."""
        return self._summed("dropped")

    def _summed(self, name: str) -> int | None:
        found = [int(call.sums[name]) for call in self._calls if name in call.sums]
        return sum(found) if found else None

    def _joined(self, name: str, fill: int) -> Tensor | None:
        parts = [getattr(call.routing, name) for call in self._calls]
        if not parts or parts[0] is None:
            return None
        width = max(part.shape[1] for part in parts)
        return torch.cat([nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in parts])


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Mapping[str, RecordedRouting]]:
    """Record where tokens go: ``with record_routing(model) as log: model(x)``, then ``log["blocks.0.ffn"].ids``.

    Forwards that other threads run in the meantime are not recorded, unless the model is compiled.
    """
    layers = dict(moe_layers(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} holds no MoE layer, so it has no routing to record")
    with ExitStack() as stack:
        yield {
            name: RecordedRouting(stack.enter_context(layer.statistics.recording()), layer.choices, layer.open_choices)
            for name, layer in layers.items()
        }


def load_statistics(model: nn.Module, *, reset: bool = True) -> dict[str, LoadStatistics]:
    """The load of each layer whose router chooses, by module name, over all ranks and all steps since the last call.

    Call it where you log, after ``after_step``, which ends a step. A block that got no token in the whole window
    causes a warning, once.
    """
    loads = {}
    for name, layer in moe_layers(model):
        statistics = layer.statistics
        if statistics.pending and not statistics.window:
            raise RuntimeError(f"layer {name!r} has only counts of an unfinished step: call intbmoe.after_step(model)")
        load = statistics.load(layer.open_choices)
        if load is None:
            continue
        loads[name] = load
        if dead := statistics.newly_dead(load):
            idle, last = ", ".join(map(str, dead)), len(load.counts) - 1
            where = f"experts or blocks {idle}" if len(dead) > 1 else f"expert or block {idle}"
            warnings.warn(
                f"layer {name!r}: no token of {load.tokens:,} went to {where} (numbered 0 to {last})", stacklevel=2
            )
        if reset:
            statistics.window = {}
    return loads
