"""The examples on which a trained model is analysed, and how the model is run on them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from intbmoe.checks import require_positive_int
from intbmoe.routing import RecordedRouting, record_routing
from intbmoe.tasks.base import Batch, Task
from intbmoe.train.distribution import Ranks
from intbmoe.train.errors import TrainingError
from intbmoe.train.evaluation import read_split


class Sample:
    """At most ``examples`` examples, evenly spread over a split or ``among`` some of it; read once, run many times."""

    def __init__(
        self,
        task: Task,
        split: str,
        examples: int,
        ranks: Ranks,
        batch_size: int = 256,
        among: Sequence[int] | None = None,
    ) -> None:
        require_positive_int("examples", examples)
        self.task = task
        self.split = split
        self.ranks = ranks
        self.batch_size = batch_size
        self.source = read_split(task, split)  # all examples of the split
        self.among = range(len(self.source)) if among is None else among
        self.total = len(self.among)  # examples that could be taken
        if self.total == 0:
            raise TrainingError(f"the {split} split has no example{'' if among is None else ' of these classes'}")
        self.wanted = examples
        self.examples = min(examples, self.total)

    @cached_property
    def _read(self) -> list[Batch]:
        # Evenly spread, not the first ones, because a split may be sorted by class or by time.
        indices = [int(self.among[place * self.total // self.examples]) for place in range(self.examples)]
        starts = range(0, self.examples, self.batch_size)
        return [self.source.batch(indices[start : start + self.batch_size], epoch=0, seed=0) for start in starts]

    def batches(self) -> Iterator[Batch]:
        """The examples as the model sees them in evaluation, on its device."""
        yield from map(self._prepare, self._read)

    def _prepare(self, batch: Batch) -> Batch:
        return self.task.prepare(self.ranks.to_device(batch), None)

    @torch.no_grad()
    def evaluate_examples(self, model: nn.Module) -> dict[str, Tensor]:
        """The task's ``evaluate_examples`` on the whole sample, in float64 on the CPU."""
        found: dict[str, list[Tensor]] = {}
        for batch in self.batches():
            with self.ranks.autocast():
                each = self.task.evaluate_examples(model, batch)
            for name, values in each.items():
                found.setdefault(name, []).append(values.double().cpu())
        return {name: torch.cat(parts) for name, parts in found.items()}

    def routed(self, model: nn.Module) -> Iterator[tuple[Batch, Mapping[str, RecordedRouting]]]:
        """Yield each batch with every layer's routing of it."""
        for batch in self.batches():
            yield batch, self._record(model, batch)

    def routed_examples(self, model: nn.Module, indices: Sequence[int]) -> tuple[Batch, Mapping[str, RecordedRouting]]:
        """Like ``routed``, for one batch of the examples at ``indices`` of the split."""
        batch = self._prepare(self.source.batch(indices, epoch=0, seed=0))
        return batch, self._record(model, batch)

    @torch.no_grad()
    def _record(self, model: nn.Module, batch: Batch) -> Mapping[str, RecordedRouting]:
        with record_routing(model) as log, self.ranks.autocast():
            self.task.evaluate(model, batch)
        return log
