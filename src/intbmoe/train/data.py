"""Which examples form which step, which rank reads them, and the seeds of everything random.

The order of an epoch's examples depends only on (seed, epoch). They are cut into global batches; an incomplete last
batch is dropped, and a set smaller than one batch is a single batch. Each rank takes a contiguous part of a global
batch, and each micro-batch a contiguous part of that, so neither the number of devices nor the size of a micro-batch
changes which examples form a step. Training can start at any step without reading the earlier ones.

No random generator carries state from step to step: the numbers of a step follow from (seed, purpose, step, rank). A
resumed run therefore needs no generator state, and an evaluation in between changes nothing.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from intbmoe.tasks.base import Batch, Examples
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train.errors import TrainingError
from intbmoe.train.signals import children_miss_signals, leave_signals_to_parent


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    text = "/".join([purpose, str(seed), *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def make_generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """A generator on the CPU, where its numbers are the same on every machine."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *numbers))


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is divided, and how many of them training takes."""

    examples: int  # size of the training set
    batch: int  # examples per step, over all ranks
    micro: int  # examples per rank and micro-batch
    accumulation: int  # micro-batches per rank and step
    steps_per_epoch: int
    steps: int  # optimizer steps of the whole training

    def epochs_to_steps(self, epochs: float) -> int:
        return max(1, round(epochs * self.steps_per_epoch))


def plan_batches(examples: int, settings: TrainSettings, world: int) -> BatchPlan:
    """Divide the recipe's global batch among ``world`` ranks, each taking at most ``device_batch`` at a time."""
    if examples < 1:
        raise TrainingError("the training split is empty")
    batch = min(settings.batch, examples)
    small = "" if batch == settings.batch else f" (the whole training set: train.batch={settings.batch} is larger)"
    if batch % world:
        raise TrainingError(f"a batch of {batch}{small} cannot be shared evenly by {world} devices: change train.batch")
    share = batch // world
    accumulation = -(-share // min(settings.device_batch or share, share))
    if share % accumulation:
        near = max(size for size in range(1, settings.device_batch + 1) if share % size == 0)
        raise TrainingError(
            f"a device's share of {share} examples (batch {batch}{small}, {world} devices) cannot be cut into equal "
            f"parts of at most train.device_batch={settings.device_batch}: {near} would do"
        )
    per_epoch = examples // batch
    steps = settings.steps or max(1, round(settings.epochs * per_epoch))
    return BatchPlan(examples, batch, share // accumulation, accumulation, per_epoch, steps)


def epoch_order(examples: int, seed: int, epoch: int) -> torch.Tensor:
    return torch.randperm(examples, generator=make_generator(seed, "order", epoch))


class MicroBatch(NamedTuple):
    """One read: which examples, of which epoch, and their position in the run."""

    step: int
    epoch: int
    offset: int  # position of the first example in the global batch
    indices: list[int]


def micro_batches(plan: BatchPlan, seed: int, rank: int, first_step: int) -> Iterator[MicroBatch]:
    """Yield everything that ``rank`` reads from ``first_step`` on, in order."""
    order, ordered = None, None
    for step in range(first_step, plan.steps):
        epoch = step // plan.steps_per_epoch
        if epoch != ordered:
            order, ordered = epoch_order(plan.examples, seed, epoch), epoch
        start = step % plan.steps_per_epoch * plan.batch
        for part in range(plan.accumulation):
            offset = (rank * plan.accumulation + part) * plan.micro
            indices = order[start + offset : start + offset + plan.micro].tolist()
            yield MicroBatch(step, epoch, offset, indices)


def evaluation_batches(examples: int, size: int, rank: int, world: int) -> Iterator[tuple[list[int], bool]]:
    """Yield (indices, counts) for ``rank``; together the ranks cover every example once.

    Every rank gets the same number of batches, because a sharded model needs all ranks in each forward. A rank with
    nothing left reads an example again, with ``counts`` False.
    """
    for start in range(0, examples, size * world):
        own = range(start + rank * size, min(start + (rank + 1) * size, examples))
        yield (list(own), True) if len(own) else ([start], False)


class _Reads(Dataset):
    def __init__(self, examples: Examples, seed: int) -> None:
        self.examples, self.seed = examples, seed

    def __getitem__(self, read: Any) -> tuple[Any, Batch]:
        epoch, indices = (read.epoch, read.indices) if isinstance(read, MicroBatch) else (0, read[0])
        return read, self.examples.batch(indices, epoch, self.seed)


def read_ahead(
    examples: Examples, reads: Iterator[Any], seed: int, workers: int, pin: bool = False
) -> Iterator[tuple[Any, Batch]]:
    """Yield (read, batch) for each entry of ``reads``, in order; ``workers`` processes prepare them ahead."""
    loader = DataLoader(
        _Reads(examples, seed),
        batch_size=None,
        sampler=reads,
        num_workers=workers,
        pin_memory=pin,
        worker_init_fn=leave_signals_to_parent,
        generator=torch.Generator(),  # the loader draws a number it never uses: keep it off the global generator
    )
    with children_miss_signals():  # the workers start here
        return iter(loader)
