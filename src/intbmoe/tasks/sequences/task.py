"""Plain item sequences: which place is visited, which item is bought next, ranked among all there are.

Check-ins of Foursquare (New York, US), reviews of Yelp and of Amazon's beauty products. Users' histories are split by
leave-last-out (``items/examples.py``). Items of the history stay candidates, because places are visited again; in
the reviews of beauty products none ever comes twice, and the metrics with " new" are those of all.

A batch has ``items`` (B, T), and ``targets`` (B, T) in training or ``target`` (B,) and ``new`` (B,) in evaluation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from intbmoe.checks import did_you_mean
from intbmoe.models.sequence import PADDING, SequenceConfig, SequenceModel
from intbmoe.settings import Checked
from intbmoe.tasks.base import Batch, Examples
from intbmoe.tasks.mixture import ffn_maker
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.sequences.examples import HeldOutEvents, TrainingWindows, require_splits
from intbmoe.tasks.sequences.floors import item_floors
from intbmoe.tasks.sequences.ranking import rank_of, ranking_metrics, ranking_sums
from intbmoe.tasks.sequences.source import ItemSequences, read_check_ins, read_item_lists

SOURCES = {"check-ins": read_check_ins, "item-lists": read_item_lists}
SPLITS = ("train", "valid", "test")
LENGTH_STEP = 16
"""Batches are cut to a multiple of it: shapes stay few, which compilers and allocators like."""


@dataclass(frozen=True, kw_only=True)
class SequenceData(Checked):
    """Where the histories are."""

    source: Literal["check-ins", "item-lists"] = "check-ins"
    """The form of the file, see docs/data.md."""
    path: str | None = None
    """An .npz file."""


@dataclass(frozen=True)
class SequencesRecipe(Recipe):
    """A recipe of the sequences task."""

    task: Literal["sequences"]
    data: SequenceData
    model: SequenceConfig


class SequencesTask:
    """The next item, ranked among all."""

    recipe_type: ClassVar[type[Recipe]] = SequencesRecipe
    metric: ClassVar[str] = "HR@10"
    higher_is_better: ClassVar[bool] = True
    causal: ClassVar[bool] = True
    dense_in_place: ClassVar[str | None] = None

    def __init__(self, recipe: SequencesRecipe) -> None:
        self.recipe = recipe
        self._sequences: ItemSequences | None = None

    def make_model(self) -> nn.Module:
        """The model with the recipe's method under the paper's budget in every FFN and the head."""
        config = self.recipe.model
        return SequenceModel(config, ffn_maker(self.recipe.moe, config.dim, config.hidden))

    def split(self, name: str) -> Examples:
        """``train`` (windows), ``valid`` (each user's last event but one) or ``test`` (the last)."""
        if name not in SPLITS:
            raise KeyError(f"no split is called {name!r}: {did_you_mean(name, SPLITS)}")
        length = self.recipe.model.length
        if name == "train":
            return TrainingWindows(self.sequences(), length)
        return HeldOutEvents(self.sequences(), name, length)

    def sequences(self) -> ItemSequences:
        """The data, read at the first call."""
        if self._sequences is None:
            data = self.recipe.data
            found = SOURCES[data.source](data.path, self.recipe.model.items)
            require_splits(found, str(data.path))
            self._sequences = found
        return self._sequences

    def prepare(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        """Cut off the columns that are padding in every row; histories are short, and no result depends on them."""
        length = int((batch["items"] != PADDING).sum(1).max())
        length = -(-length // LENGTH_STEP) * LENGTH_STEP
        return {name: value[:, :length] if value.dim() == 2 else value for name, value in batch.items()}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropy over the targets, and their number."""
        found = model(batch["items"], batch["targets"])
        return -found.sum(), torch.tensor(len(found), device=found.device)

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sums over the targets: count, loss, hits and gains, the last three for new ones too."""
        scores, target = model(batch["items"]), batch["target"]
        sums = ranking_sums(rank_of(scores, target), batch["new"])
        return {**sums, "loss": -scores.gather(1, target.unsqueeze(1)).sum()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Hit rates, NDCG, the same for new targets, their share, and the mean cross-entropy."""
        return {**ranking_metrics(sums), "loss": float(sums["loss"]) / float(sums["count"])}

    def floors(self) -> Mapping[str, Mapping[str, float]]:
        """Global popularity and each user's visit counter."""
        return item_floors(self.sequences())

    def example_inputs(self) -> tuple[Tensor]:
        """One history of the full length."""
        config = self.recipe.model
        return (torch.arange(config.length).remainder(config.items).unsqueeze(0),)
