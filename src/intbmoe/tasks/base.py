"""What a task is: data, model, loss and metrics; how it is served; how it is looked at.

The training loop, ``compare``, ``analyse``, ``export`` and ``serve`` ask it through this class and know none by name.
Data, model and loss are required. The rest has defaults, or is left out with a word, where a task does not define it.
``docs/adding-a-task.md`` goes through one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from intbmoe.checks import did_you_mean, require
from intbmoe.tasks.looking import Shown, View
from intbmoe.tasks.preparation import Preparation
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.serving import Catalogue, Graph, Predictor, Request

Batch = dict[str, Tensor]
SPLITS = ("train", "valid", "test")


class Examples(Protocol):
    """A finite collection of examples that can be read in any order."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The examples at ``indices`` as tensors on the CPU.

        Randomness (augmentation) is a function of (seed, epoch, index) alone: the same example in the same epoch is
        the same tensor whatever the worker, the rank, the batch around it or an interruption.
        """


class Task:
    """One benchmark. Built from its recipe; reading the data happens at the first use of a split."""

    name: ClassVar[str]
    """What recipes call it; ``register_task`` sets it."""
    recipe_type: ClassVar[type[Recipe]]
    """The recipe subclass with this task's ``data`` and ``model`` settings."""
    metric: ClassVar[str] = "loss"
    """The metric that decides, such as "accuracy", one of those ``metrics`` gives."""
    higher_is_better: ClassVar[bool] = False
    reported: ClassVar[Mapping[str, str]] = {}
    """Further metrics that every table shows beside it, with their headings: those of the paper's tables."""
    causal: ClassVar[bool] = False
    """Whether the model predicts what comes next, so that no layer of it may look ahead."""
    dense_in_place: ClassVar[str | None] = None
    """The method that makes the backbone's own FFN in the place of a mixture, where the dense model is not that already
    (mixtures may start from other weights, and on images the class token has an FFN of its own). None where it is."""
    inputs: ClassVar[tuple[str, ...]] = ()
    """The entries of a batch that the model is called with, in this order."""
    preparations: ClassVar[Mapping[str, Preparation]] = {}
    """What ``intbmoe prepare NAME`` makes ready for this task, by name."""
    own_source: ClassVar[str | None] = None
    """The ``data.source`` that reads what ``save_data`` writes; None where the task takes no data from Python."""
    predictor: ClassVar[type[Predictor] | None] = None
    """How requests are answered; None where the task cannot be served."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    # ---- data, model, loss, metrics ---------------------------------------------------------------------------------

    def resolve(self) -> Recipe:
        """The recipe with what it leaves to its data (how many classes there are) filled in, here too.

        Called once, before a run or a comparison begins: from then on the recipe says it, and no model needs the data.
        """
        return self.recipe

    @classmethod
    def save_data(cls, data: Any, folder: Path, settings: Any) -> None:
        """Write a data set that lives in Python to ``folder``, as files that ``data.path`` takes (``datasets.py``)."""
        raise ValueError(f"the task {cls.name!r} takes no data from Python: give it files (data.path)")

    def make_model(self) -> nn.Module:
        """The untrained model of the recipe, its FFNs made by the registry under ``match_budget`` (``ffn_maker``)."""
        raise self._lacks("make_model()")

    def read_split(self, name: str) -> Examples:
        """``train`` (augmented), ``valid`` (held out of the training data, may be empty) or ``test``."""
        raise self._lacks("read_split(name)")

    def split(self, name: str) -> Examples:
        if name not in SPLITS:
            raise KeyError(f"no split is called {name!r}: {did_you_mean(name, SPLITS)}")
        return self.read_split(name)

    def held_out(self) -> Examples:
        """What no training saw, for checks that choose nothing: the validation split, or without one the test split."""
        valid = self.split("valid")
        return valid if len(valid) else self.split("test")

    def prepare(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        """What is done to a whole batch on its device before the model sees it (mixup, cutmix); None in evaluation."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the loss over the batch's units (images, tokens) and their number: means are taken globally."""
        raise self._lacks("loss(model, batch)")

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sums over the batch, ``count`` among them, which add up over batches and ranks.

        They are those of ``evaluate_examples`` where a task defines it, else the loss alone.
        """
        if self.has_outcomes():
            each = self.evaluate_examples(model, batch)
            return {name: values.double().sum() for name, values in each.items()}
        total, count = self.loss(model, batch)
        return {"count": count, "loss": total}

    def evaluate_examples(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """What each example of the batch adds to the sums of ``metrics``: (B,) of each, ``count`` and ``loss`` too.

        With these two models are compared on the same examples, so that the error of their difference is known. A run
        keeps those of the test split (``outcomes.npz``). What needs them is left out where a task does not define it.
        """
        raise self._lacks("evaluate_examples(model, batch)", "comparing two models on the same examples needs")

    @classmethod
    def has_outcomes(cls) -> bool:
        """Whether the task evaluates each example by itself."""
        return cls.evaluate_examples is not Task.evaluate_examples

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics from summed ``evaluate``: each sum divided by ``count``."""
        count = float(sums["count"])
        require(count > 0, "count", count, "positive: no example was evaluated")
        return {name: float(total) / count for name, total in sums.items() if name != "count"}

    def floors(self) -> Mapping[str, Mapping[str, float]]:
        """Metrics of the test split that need no learning, by name, such as popularity; ``compare`` prints them."""
        return {}

    def ceilings(self) -> Mapping[str, Mapping[str, float]]:
        """Metrics of the test split that no model can be expected to exceed, by name, where the data was made so."""
        return {}

    def example_inputs(self) -> tuple[Any, ...]:
        """Inputs of one forward at batch 1, for counting FLOPs."""
        return tuple(self._inputs_of(self.held_out().batch([0], epoch=0, seed=0)))

    # ---- export and serving -----------------------------------------------------------------------------------------

    def run_model(self, model: nn.Module, batch: Batch, dtype: torch.dtype) -> Tensor:
        """The scores that the metrics come from, computed in ``dtype``."""
        return model(*(part.to(dtype) if part.is_floating_point() else part for part in self._inputs_of(batch)))

    def depth(self) -> int:
        """Layers one after another: rounding errors grow with their root."""
        return getattr(self.recipe.model, "depth", 1)

    def catalogue(self) -> Catalogue:
        """What an artifact must say of the data for the predictor to understand requests."""
        return Catalogue()

    def golden_requests(self, predictor: Predictor, count: int) -> list[Request]:
        """Requests made of ``held_out`` examples, whose answers a server checks before it trusts an artifact."""
        return list(predictor.request_schema["examples"])

    def graph(self) -> Graph:
        """The model's inputs for ONNX and AOTInductor."""
        return Graph(self.inputs)

    @classmethod
    def find_predictor(cls) -> type[Predictor]:
        if cls.predictor is None:
            raise ValueError(f"the task {cls.name!r} cannot be served: it defines no predictor")
        return cls.predictor

    # ---- looking at a trained model ---------------------------------------------------------------------------------

    def views(self) -> list[View]:
        """Ways to tell tokens apart, for shares of the routing; empty: this is left out of an analysis."""
        return []

    def shown(self, split: Examples) -> Shown | None:
        """How examples of a split are shown; None: this is left out of an analysis."""
        return None

    def _inputs_of(self, batch: Batch) -> list[Tensor]:
        if not self.inputs:
            raise self._lacks("inputs, the entries of a batch that its model is called with")
        return [batch[name] for name in self.inputs]

    def _lacks(self, what: str, who: str = "every task needs") -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not define {what}, which {who}")
