"""Plain item sequences: which place is visited or which item is bought next, ranked among all items.

Users' histories are split by leave-last-out (``examples.py``). Items of the history remain candidates, because places
are visited again. A batch has ``items`` (B, T), and ``targets`` (B, T) in training or ``target`` (B,) and ``new`` (B,)
in evaluation.

In an artifact, ``catalogue.json`` has first_id, the id of the model's item 0 in the data, and, if items have names
instead of numbers, items, the name of each. Its graphs take items (B, T), with −1 after the last, and return
log-probabilities (B, items).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from intbmoe.models.sequence import PADDING, SequenceConfig, SequenceModel
from intbmoe.registry import register_task
from intbmoe.settings import Checked
from intbmoe.tasks.base import Batch, Examples, Task
from intbmoe.tasks.looking import NO_LABEL, Content, Shown, Token, View, position_view, spread
from intbmoe.tasks.mixture import ffn_maker
from intbmoe.tasks.own_data import require_known, require_unused, resolved
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.sequences.examples import HeldOutEvents, TrainingWindows, require_splits
from intbmoe.tasks.sequences.ranking import item_floors, rank_of, ranking_gains, ranking_metrics
from intbmoe.tasks.sequences.serving import ItemPredictor
from intbmoe.tasks.sequences.source import ItemSequences, read_check_ins, read_item_lists
from intbmoe.tasks.sequences.table import read_table, save_events
from intbmoe.tasks.serving import Catalogue, Graph, Request
from intbmoe.tasks.serving.requests import spread_evenly

SOURCES = {"check-ins": read_check_ins, "item-lists": read_item_lists}
LENGTH_STEP = 16  # batches are cut to a multiple of this: few shapes suit compilers and allocators


@dataclass(frozen=True, kw_only=True)
class SequenceData(Checked):
    """Where the histories are."""

    source: Literal["check-ins", "item-lists", "table"] = "check-ins"
    """The form of the file: table is any table of user, item and time; for the others see docs/data.md."""
    path: str | None = None
    """An .npz file; for table a .csv, .tsv or .parquet file."""
    user: str | None = None
    """table: the column with the user; None to find it by a common name."""
    item: str | None = None
    """table: the column with the item; None to find it by a common name."""
    time: str | None = None
    """table: the column with the time, numbers or dates; None to find it by a common name."""
    fingerprint: str | None = None
    """table: fingerprint of the histories. Set when a run begins; different data is then refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unused(self, "table", ("user", "item", "time", "fingerprint"))


@dataclass(frozen=True)
class SequencesRecipe(Recipe):
    """A recipe of the sequences task."""

    task: Literal["sequences"]
    data: SequenceData
    model: SequenceConfig


@register_task("sequences")
class SequencesTask(Task):
    recipe_type: ClassVar[type[Recipe]] = SequencesRecipe
    metric = "HR@10"
    reported: ClassVar = {"HR@1": "HR@1", "NDCG@10": "NDCG@10"}
    higher_is_better = True
    causal = True
    inputs = ("items",)
    predictor = ItemPredictor
    own_source = "table"

    def resolve(self) -> Recipe:
        if self.recipe.data.source == "table":
            self.recipe = resolved(self.recipe, self.sequences.fingerprint, items=self.sequences.item_count)
        return self.recipe

    @classmethod
    def save_data(cls, data: Any, folder: Path, settings: SequenceData) -> None:
        save_events(data, folder)

    def make_model(self) -> nn.Module:
        config = self.recipe.model
        require_known(config.items, "model.items")
        return SequenceModel(config, ffn_maker(self.recipe.moe, config.dim, config.hidden, domain="language"))

    def read_split(self, name: str) -> Examples:
        """Return ``train`` (windows), ``valid`` (each user's second-to-last event) or ``test`` (the last)."""
        length = self.recipe.model.length
        if name == "train":
            return TrainingWindows(self.sequences, length)
        return HeldOutEvents(self.sequences, name, length)

    @cached_property
    def sequences(self) -> ItemSequences:
        data, items = self.recipe.data, self.recipe.model.items
        found = read_table(data, items) if data.source == "table" else SOURCES[data.source](data.path, items)
        require_splits(found, str(data.path))
        return found

    def prepare(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        """Cut off columns that are padding in every row; histories are short, and no result depends on padding."""
        length = int((batch["items"] != PADDING).sum(1).max())
        length = -(-length // LENGTH_STEP) * LENGTH_STEP
        return {name: value[:, :length] if value.dim() == 2 else value for name, value in batch.items()}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        found = model(batch["items"], batch["targets"])
        return -found.sum(), (batch["targets"] != PADDING).sum()

    def evaluate_examples(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        scores, target = model(batch["items"]), batch["target"]
        gains = ranking_gains(rank_of(scores, target), batch["new"])
        return {**gains, "loss": -scores.gather(1, target.unsqueeze(1)).squeeze(1)}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {**ranking_metrics(sums), "loss": float(sums["loss"]) / float(sums["count"])}

    def floors(self) -> Mapping[str, Mapping[str, float]]:
        return item_floors(self.sequences)

    def example_inputs(self) -> tuple[Tensor]:
        config = self.recipe.model
        return (torch.arange(config.length).remainder(config.items).unsqueeze(0),)

    def catalogue(self) -> Catalogue:
        if self.recipe.data.source == "table":
            return Catalogue({"first_id": 0, "items": list(self.sequences.names)})
        return Catalogue({"first_id": 1 if self.recipe.data.source == "item-lists" else 0})

    def golden_requests(self, predictor: ItemPredictor, count: int) -> list[Request]:
        split, requests = self.split("valid"), []
        for number, index in enumerate(spread_evenly(len(split), count)):
            items = split.items[split.starts[index] : split.events[index]].tolist()
            history = [predictor.name_of(item) for item in items]
            requests.append({"history": history, "visited": ("allow", "exclude")[number % 2]})
        return requests

    def graph(self) -> Graph:
        return Graph(self.inputs, "items", self.recipe.model.length)

    def views(self) -> list[View]:
        everywhere = position_view(self.recipe.model.length, lambda batch: batch["items"] != PADDING)
        return [View("visit", ("first", "again"), visits), everywhere]

    def shown(self, split: Examples) -> Shown:
        names = self.sequences.names

        def describe(batch: Batch, row: int, index: int) -> Content:
            items = batch["items"][row].tolist()
            known = [None if item == PADDING else names[item] if names else str(item) for item in items]
            tokens = [None if name is None else Token("item", name) for name in known]
            return Content(f"history {index}", tokens)

        return Shown("items", spread(len(split)), describe)


def visits(batch: Batch) -> Tensor:
    """Return (B, T): 1 if the item also occurs earlier in its row, else 0; padding has no label."""
    items = batch["items"]
    earlier = torch.ones(items.shape[1], items.shape[1], dtype=torch.bool, device=items.device).tril(-1)
    again = ((items.unsqueeze(2) == items.unsqueeze(1)) & earlier).any(2)
    return torch.where(items != PADDING, again.long(), NO_LABEL)
