"""What a task is: its data, model, loss and metrics, how it is served, and how it is analysed.

The training loop, ``compare``, ``analyse``, ``export`` and ``serve`` use tasks through this class and know none by
name. Data, model and loss are required. If a task does not define the rest, there are defaults, or the part is left out
with a message. ``docs/adding-a-task.md`` walks through an example.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from intbmoe.checks import UnknownNameError, did_you_mean, require
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
        """Return the examples at ``indices`` as tensors on the CPU.

        Randomness (augmentation) depends on (seed, epoch, index) alone: the same example in the same epoch is the same
        tensor whatever the worker, the rank, the rest of the batch, or an interruption.
        """


class Task:
    """One benchmark, built from its recipe; data is read when a split is first used."""

    name: ClassVar[str]
    """The name in recipes; ``register_task`` sets it."""
    recipe_type: ClassVar[type[Recipe]]
    """The recipe subclass with this task's ``data`` and ``model`` settings."""
    metric: ClassVar[str] = "loss"
    """The metric that decides, such as "accuracy", one of those that ``metrics`` returns."""
    higher_is_better: ClassVar[bool] = False
    reported: ClassVar[Mapping[str, str]] = {}
    """Further metrics that every table shows beside it, with their headings: those in the paper's tables."""
    causal: ClassVar[bool] = False
    """Whether the model predicts what comes next, so that none of its layers may look ahead."""
    dense_in_place: ClassVar[str | None] = None
    """The method that makes the backbone's own FFN in the place of a mixture, if the dense model differs from that
    (mixtures may start from other weights, and on images the class token has its own FFN). None if it does not."""
    inputs: ClassVar[tuple[str, ...]] = ()
    """The entries of a batch that the model is called with, in order."""
    preparations: ClassVar[Mapping[str, Preparation]] = {}
    """What ``intbmoe prepare NAME`` prepares for this task, by name."""
    own_source: ClassVar[str | None] = None
    """The ``data.source`` that reads what ``save_data`` writes; None if the task takes no data from Python."""
    predictor: ClassVar[type[Predictor] | None] = None
    """How requests are answered; None if the task cannot be served."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    # ---- data, model, loss, metrics ---------------------------------------------------------------------------------

    def resolve(self) -> Recipe:
        """Return the recipe with everything filled in that depends on its data, such as the number of classes.

        It is called once, before a run or a comparison begins. From then on the recipe is complete, here too, and no
        model needs the data.
        """
        return self.recipe

    @classmethod
    def save_data(cls, data: Any, folder: Path, settings: Any) -> None:
        """Write a data set given in Python to ``folder``, as files that ``data.path`` accepts (``datasets.py``)."""
        raise ValueError(f"the task {cls.name!r} does not accept data from Python: give it files (data.path)")

    def make_model(self) -> nn.Module:
        """Return the untrained model, with FFNs made by the registry under ``match_budget`` (``ffn_maker``)."""
        raise self._lacks("make_model()")

    def read_split(self, name: str) -> Examples:
        """Return ``train`` (augmented), ``valid`` (held out of the training data, may be empty) or ``test``."""
        raise self._lacks("read_split(name)")

    def split(self, name: str) -> Examples:
        if name not in SPLITS:
            raise UnknownNameError(f"no split is called {name!r}: {did_you_mean(name, SPLITS)}")
        return self.read_split(name)

    def held_out(self) -> Examples:
        """Return data that training never saw, for checks that select nothing: validation, or test if there is none."""
        valid = self.split("valid")
        return valid if len(valid) else self.split("test")

    def prepare(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        """Change a whole batch on its device before the model sees it (mixup); in evaluation ``generator`` is None."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over the batch's units (images, tokens) and their number; means are global."""
        raise self._lacks("loss(model, batch)")

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return sums over the batch, including ``count``, which can be added over batches and ranks.

        They come from ``evaluate_examples`` if the task defines it, otherwise they are the loss alone.
        """
        if self.has_outcomes():
            each = self.evaluate_examples(model, batch)
            return {name: values.double().sum() for name, values in each.items()}
        total, count = self.loss(model, batch)
        return {"count": count, "loss": total}

    def evaluate_examples(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return what each example adds to the sums of ``metrics``: (B,) for each, including ``count`` and ``loss``.

        This allows two models to be compared on the same examples, so that the error of their difference is known. A
        run keeps the results on the test split (``outcomes.npz``). Without this method, what needs them is left out.
        """
        raise self._lacks("evaluate_examples(model, batch)", "comparing two models on the same examples needs")

    @classmethod
    def has_outcomes(cls) -> bool:
        """Whether the task evaluates each example separately."""
        return cls.evaluate_examples is not Task.evaluate_examples

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics from the sums of ``evaluate``: each sum divided by ``count``."""
        count = float(sums["count"])
        require(count > 0, "count", count, "positive: no example was evaluated")
        return {name: float(total) / count for name, total in sums.items() if name != "count"}

    def floors(self) -> Mapping[str, Mapping[str, float]]:
        """Return test metrics of predictions that need no learning, such as popularity; ``compare`` prints them."""
        return {}

    def ceilings(self) -> Mapping[str, Mapping[str, float]]:
        """Return test metrics that no model can be expected to exceed, by name, if the data was generated that way."""
        return {}

    def example_inputs(self) -> tuple[Any, ...]:
        """Return the inputs of one forward at batch size 1, for counting FLOPs."""
        return tuple(self._inputs_of(self.held_out().batch([0], epoch=0, seed=0)))

    # ---- export and serving -----------------------------------------------------------------------------------------

    def run_model(self, model: nn.Module, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Return the scores that the metrics are computed from, computed in ``dtype``."""
        return model(*(part.to(dtype) if part.is_floating_point() else part for part in self._inputs_of(batch)))

    def depth(self) -> int:
        """Return the number of consecutive layers: rounding errors grow with its square root."""
        return getattr(self.recipe.model, "depth", 1)

    def catalogue(self) -> Catalogue:
        """Return what an artifact must say about the data so that the predictor understands requests."""
        return Catalogue()

    def golden_requests(self, predictor: Predictor, count: int) -> list[Request]:
        """Make requests from ``held_out`` examples; a server checks their answers before it trusts an artifact."""
        return list(predictor.request_schema["examples"])

    def graph(self) -> Graph:
        """Return the model's inputs for ONNX and AOTInductor."""
        return Graph(self.inputs)

    @classmethod
    def find_predictor(cls) -> type[Predictor]:
        if cls.predictor is None:
            raise ValueError(f"the task {cls.name!r} cannot be served: it defines no predictor")
        return cls.predictor

    # ---- looking at a trained model ---------------------------------------------------------------------------------

    def views(self) -> list[View]:
        """Return ways to tell tokens apart, for shares of the routing; if empty, an analysis leaves this out."""
        return []

    def shown(self, split: Examples) -> Shown | None:
        """Return how examples of a split are shown; if None, an analysis leaves this out."""
        return None

    def _inputs_of(self, batch: Batch) -> list[Tensor]:
        if not self.inputs:
            raise self._lacks("inputs, the entries of a batch that its model is called with")
        return [batch[name] for name in self.inputs]

    def _lacks(self, what: str, who: str = "every task needs") -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not define {what}, which {who}")
