"""What a layer's forwards produce besides their outputs, and how evenly experts are used.

``LayerStatistics`` alone does this bookkeeping: ``layer.py`` passes it each forward, ``steps.py`` collects losses and
counts for a whole model, and ``routing.py`` shows where tokens went.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


def recomputing() -> bool:
    """Whether a backward is running: a forward inside it is a recomputation by activation checkpointing."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Routing(NamedTuple):
    ids: Tensor | None
    """(N, k_max), −1 if a token has no further choice or is masked; None for a method that does not choose."""
    weights: Tensor | None
    """(N, k_max), the weight of each choice, 0 if there is none."""


@dataclass(frozen=True)
class Result:
    """What ``MoELayer.compute`` returns: the output, and its routing, losses and statistics."""

    y: Tensor
    """(B, T, d)."""
    routing: Routing | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Auxiliary losses, coefficients applied."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Statistics that add up over micro-batches and ranks, such as ``load``: assignments per expert."""


@dataclass
class Record:
    """What a training forward leaves for ``aux_loss``."""

    losses: dict[str, Tensor]
    sums: dict[str, Tensor]
    differentiable: bool  # whether the forward ran with gradients; reentrant checkpointing runs it without
    taken: bool = False


class RoutedForward(NamedTuple):
    """What a forward leaves for ``record_routing``."""

    routing: Routing
    shape: tuple[int, ...]  # (…, T)
    count: Tensor  # valid tokens
    sums: dict[str, Tensor]
    """The forward's statistics: ``load``, and ``dropped`` or ``untaken`` for methods that leave tokens out."""

    def copy(self) -> "RoutedForward":
        ids, weights = (None if tensor is None else tensor.clone() for tensor in self.routing)
        sums = {key: value.clone() for key, value in self.sums.items()}
        return self._replace(routing=Routing(ids, weights), count=self.count.clone(), sums=sums)


class LayerStatistics:
    """The bookkeeping of one layer: a plain attribute, not a submodule or buffer, and not in the ``state_dict``.

    A training forward overwrites the record. ``aux_loss`` takes it and adds its counts to the unfinished step's;
    ``after_step`` ends the step and adds them to the window; ``load_statistics`` reads the window and clears it.
    """

    def __init__(self) -> None:
        self.record: Record | None = None  # of the last training forward, until it is taken
        self.pending: dict[str, Tensor] = {}  # counts of the step that is not finished yet, on this rank
        self.window: dict[str, Tensor] = {}  # counts of all steps since the window was last cleared, over all ranks
        self.warned: set[int] = set()  # dead experts that were already warned about
        self._recordings: dict[int, list[RoutedForward]] = {}  # thread id → its recorded forwards
        self.uncollected = False  # whether gradients went through a forward whose losses were never collected

    # Called by a forward.

    def wants(self, training: bool) -> bool:
        # Activation checkpointing reruns forwards during backward: they were counted the first time.
        return not recomputing() and (training or self._recording is not None)

    def keep(self, result: Result, count: Tensor, shape: tuple[int, ...], training: bool, layer: str) -> None:
        """Keep the result of a forward of ``count`` valid tokens and shape (…, T); errors call the layer ``layer``."""
        if training:
            if self.uncollected:
                self.uncollected = False
                raise RuntimeError(
                    f"{layer} was trained without its auxiliary losses: add intbmoe.aux_loss(model) to the loss once "
                    f"per forward, or let intbmoe.connect(model) do so, and use each layer once per forward; if the "
                    f"gradients were not for training, compute them in evaluation mode"
                )
            self.record = Record(result.losses, {"tokens": count, **result.sums}, torch.is_grad_enabled())
            self._watch(result.y, self.record)
        calls = self._recording
        if calls is not None:
            ids, weights = result.routing or Routing(None, None)
            routing = Routing(ids, weights if weights is None else weights.detach())
            sums = {key: value.detach() for key, value in result.sums.items()}
            calls.append(RoutedForward(routing, shape, count, sums))

    def _watch(self, y: Tensor, record: Record) -> None:
        """Notice when gradients go through ``y`` before the losses of the same forward are collected."""

        def notice(_: Tensor) -> None:
            self.uncollected |= not record.taken

        seen = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
        if seen and record.losses and y.requires_grad:
            y.register_hook(notice)

    # From the record to the step, from the step to the window.

    def take_record(self) -> Record | None:
        record, self.record = self.record, None
        if record is not None:
            record.taken = True
        return record

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for key, value in sums.items():
            value = value.detach()
            # A copy: under torch.compile(mode="reduce-overhead") the next forward overwrites what this one returned.
            self.pending[key] = self.pending[key] + value if key in self.pending else value.clone()

    def exchange_pending(self, counts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replace the unfinished step's counts by ``counts`` and return the old ones."""
        before, self.pending = self.pending, counts
        return before

    def end_step(self) -> None:
        for key, value in self.exchange_pending({}).items():
            self.window[key] = self.window[key] + value if key in self.window else value
        self.record = None  # may be left from a recomputation by checkpointing

    def load(self, opened: Tensor | None) -> "LoadStatistics | None":
        if "load" not in self.window:
            return None
        untaken = int(self.window["untaken"]) if "untaken" in self.window else None
        tokens, dropped = int(self.window["tokens"]), int(self.window.get("dropped", 0))
        return load_statistics_of(self.window["load"], tokens, dropped, opened, untaken)

    def newly_dead(self, load: "LoadStatistics") -> list[int]:
        new = set(load.dead) - self.warned if load.tokens else set()
        self.warned |= new
        return sorted(new)

    def restore(self, window: dict[str, Tensor], warned: Iterable[int]) -> None:
        self.window, self.warned = window, set(warned)

    # Where tokens go.

    @contextmanager
    def recording(self) -> Iterator[list[RoutedForward]]:
        """Yield a list to which every forward of this thread is added inside the context."""
        thread, calls = threading.get_ident(), []
        outer = self._recordings.get(thread)
        self._recordings[thread] = calls
        try:
            yield calls
        finally:
            del self._recordings[thread]
            if outer is not None:  # contexts nest: the outer one also gets what the inner one recorded
                outer.extend(calls)
                self._recordings[thread] = outer

    @property
    def _recording(self) -> list[RoutedForward] | None:
        """The list to which this thread's forwards are added; None if they are not recorded."""
        if not self._recordings:
            return None
        if torch.compiler.is_compiling():  # a graph cannot ask which thread it runs on
            return list(self._recordings.values())[-1]
        return self._recordings.get(threading.get_ident())

    def repeat(self, calls: Iterable[RoutedForward]) -> None:
        """Record ``calls`` again after a replayed graph has overwritten their tensors; a recording gets copies."""
        recording = self._recording
        if recording is not None:
            recording.extend(call.copy() for call in calls)

    def __getstate__(self) -> dict[str, Any]:
        # Non-leaf tensors in an attribute break deepcopy and pickle. They belong to a forward, not to the layer.
        return {**self.__dict__, "record": None, "_recordings": {}}


@dataclass(frozen=True)
class LoadStatistics:
    """Load over a window of tokens. One assignment is one token sent to one expert or block."""

    counts: tuple[int, ...]
    """Assignments per expert or block."""
    tokens: int
    """Valid tokens, without padding."""
    utilisation: float
    """Fraction of the experts that got at least one assignment."""
    worst_case: float
    """Largest load divided by mean load: 1 is perfect balance, the number of experts is collapse."""
    entropy: float
    """Entropy of the loads divided by its maximum: 1 is perfect balance, 0 is collapse."""
    dead: tuple[int, ...]
    """Experts without a single assignment."""
    dropped: float = 0.0
    """Fraction of the wanted assignments that were dropped because the expert was full; NaN if none was wanted."""
    untaken: float | None = None
    """Fraction of the tokens that no expert took; None if the method does not count them, or nothing was assigned."""


def load_statistics_of(
    counts: Tensor, tokens: int, dropped: int = 0, opened: Tensor | None = None, untaken: int | None = None
) -> LoadStatistics:
    """Compute statistics from (E,) assignment counts; without any assignment, ratios of loads are NaN.

    ``opened`` (E,) says which experts are open in a growing pool: closed ones without load do not count as dead.
    """
    loads = [int(count) for count in counts.tolist()]
    present = [index for index in range(len(loads)) if opened is None or bool(opened[index]) or loads[index]]
    total = sum(loads)
    dead = tuple(index for index in present if loads[index] == 0)
    dropped_share = dropped / (total + dropped) if total + dropped else math.nan
    if total == 0:
        return LoadStatistics(tuple(loads), tokens, math.nan, math.nan, math.nan, dead, dropped_share)
    shares = [loads[index] / total for index in present]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return LoadStatistics(
        counts=tuple(loads),
        tokens=tokens,
        utilisation=1 - len(dead) / len(present),
        worst_case=max(shares) * len(present),
        entropy=entropy / math.log(len(present)) if len(present) > 1 else 1.0,
        dead=dead,
        dropped=dropped_share,
        untaken=None if untaken is None else untaken / tokens,
    )
