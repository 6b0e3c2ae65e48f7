"""What the training loop asks of a task: data, model, loss, metrics. The loop knows tasks, never a method by name."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from intbmoe.tasks.recipe import Recipe

Batch = dict[str, Tensor]


class Examples(Protocol):
    """A finite collection of examples that can be read in any order."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The examples at ``indices`` as tensors on the CPU.

        Randomness (augmentation) is a function of (seed, epoch, index) alone: the same example in the same epoch is
        the same tensor whatever the worker, the rank, the batch around it or an interruption.
        """
        ...


class Task(Protocol):
    """One benchmark. Built from its recipe; reading the data happens at the first use of a split."""

    recipe_type: ClassVar[type[Recipe]]
    """The recipe subclass with this task's ``data`` and ``model`` settings."""
    metric: ClassVar[str]
    """The metric that decides, such as "accuracy", one of those ``metrics`` gives."""
    higher_is_better: ClassVar[bool]
    causal: ClassVar[bool]
    """Whether the model predicts what comes next, so that no layer of it may look ahead."""
    dense_in_place: ClassVar[str | None]
    """The method that makes the backbone's own FFN where a mixture stands, if dense itself does not stand so: a mixture
    may get other starting weights, and on images a class token with an FFN of its own. None if it does."""

    def __init__(self, recipe: Recipe) -> None: ...

    def make_model(self) -> nn.Module:
        """The untrained model of the recipe, its FFNs made by the registry under ``match_budget``."""
        ...

    def split(self, name: str) -> Examples:
        """``train`` (augmented), ``valid`` (held out of the training data) or ``test``."""
        ...

    def prepare(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        """What is done to a whole batch on its device before the model sees it (mixup, cutmix); None in evaluation."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the loss over the batch's units (images, tokens) and their number: means are taken globally."""
        ...

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sums over the batch, ``count`` among them, which add up over batches and ranks."""
        ...

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics from summed ``evaluate``: accuracy, loss, …"""
        ...

    def floors(self) -> Mapping[str, Mapping[str, float]]:
        """Metrics of the test split that need no learning, by name: popularity, a counter. Empty where none is usual.

        What does not beat them has learned nothing; ``compare`` prints them under its table.
        """
        ...

    def example_inputs(self) -> tuple[Any, ...]:
        """Inputs of one forward at batch 1, for counting FLOPs."""
        ...
