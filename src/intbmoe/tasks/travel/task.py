"""Where a user goes next: IntTravel's "where" task, on its own data and on embedded journeys.

The destination of each target session is ranked against 64 other places (``journeys/candidates.py``). HR@n is the share
of targets whose true place is among the first n, NDCG@5 the mean of 1/log₂(1 + rank) over those within the first five.
A place that scores as high as the true one is ranked before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import did_you_mean, require
from intbmoe.models.travel import FEEDBACK, PLACE, PROFILE_TOKENS, SCENARIO, TravelConfig, TravelModel
from intbmoe.settings import Checked, MustBe, PositiveInt
from intbmoe.tasks.base import Batch, Examples
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.mixture import ffn_maker
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.travel.data import JourneyData
from intbmoe.tasks.travel.examples import SPLITS, JourneyExamples, JourneyReader
from intbmoe.tasks.travel.floors import floor_scores
from intbmoe.tasks.travel.generator import make_journeys

TOP = 5


@dataclass(frozen=True, kw_only=True)
class TravelData(Checked):
    """Which journeys."""

    source: Literal["journeys", "inttravel"] = "journeys"
    """journeys are made by a generator; docs/data.md says how to get and prepare IntTravel."""
    path: str | None = None
    """What intbmoe prepare inttravel made. journeys need none."""
    users: PositiveInt = 2000
    """How many users the generator makes."""
    valid_windows: PositiveInt | None = None
    """Windows of the validation split that are evaluated, evenly spread over all; None for all."""
    utc_offset: Annotated[float, MustBe("a number between -14 and 14", lambda value: abs(value) <= 14)] = 0.0
    """Hours by which the users' clocks are ahead of UTC, for the hour and the weekday of a session."""


@dataclass(frozen=True)
class TravelRecipe(Recipe):
    """A recipe of the travel task."""

    task: Literal["travel"]
    data: TravelData
    model: TravelConfig


class TravelTask:
    """The destination of the next journey."""

    recipe_type: ClassVar[type[Recipe]] = TravelRecipe
    metric: ClassVar[str] = "HR@5"
    higher_is_better: ClassVar[bool] = True
    causal: ClassVar[bool] = True
    dense_in_place: ClassVar[str | None] = None

    def __init__(self, recipe: TravelRecipe) -> None:
        self.recipe = recipe
        self._reader: JourneyReader | None = None
        self._splits: dict[str, JourneyExamples] = {}

    def make_model(self) -> nn.Module:
        """The travel model with the recipe's method in every FFN and as its head, under the paper's budget."""
        config = self.recipe.model
        return TravelModel(config, ffn_maker(self.recipe.moe, config.dim, config.hidden))

    def split(self, name: str) -> Examples:
        """``train`` (sessions before all others), ``valid`` or ``test`` (the last ones), by time."""
        if name not in SPLITS:
            raise KeyError(f"no split is called {name!r}: {did_you_mean(name, SPLITS)}")
        if name not in self._splits:  # finding the windows reads the times of all sessions
            data = self.recipe.data
            if self._reader is None:
                self._reader = JourneyReader(open_data(data), self.recipe.model.sessions, data.utc_offset)
            at_most = data.valid_windows if name == "valid" else None
            self._splits[name] = JourneyExamples(self._reader, name, at_most)
        return self._splits[name]

    def prepare(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        """Nothing: all randomness is in the negatives, which come with the examples."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropy of the true place among the candidates over the target sessions, their number."""
        scores = model(batch)
        return _cross_entropy(scores), batch["targets"].sum()

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sums over the target sessions: count, loss, hits at 1 and at 5, gain at 5."""
        scores = model(batch)
        return {"loss": _cross_entropy(scores), **ranking_sums(scores)}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """HR@1, HR@5, NDCG@5 and, where there is one, the mean cross-entropy."""
        count = sums["count"]
        require(count > 0, "count", count, "positive: no target session was evaluated")
        names = {"HR@1": "hits1", "HR@5": "hits5", "NDCG@5": "gain5", "loss": "loss"}
        return {metric: float(sums[total]) / float(count) for metric, total in names.items() if total in sums}

    def floors(self) -> Mapping[str, Mapping[str, float]]:
        """Popularity and the per-user visit counter on the test split, on the same candidates."""
        totals: dict[str, dict[str, float]] = {}
        for chunk in floor_scores(open_data(self.recipe.data)):
            for name, scores in chunk.items():
                sums = totals.setdefault(name, {})
                for key, value in ranking_sums(torch.from_numpy(scores)).items():
                    sums[key] = sums.get(key, 0.0) + float(value)
        return {name: self.metrics(sums) for name, sums in totals.items()}

    def example_inputs(self) -> tuple[dict[str, Tensor]]:
        """One full sequence; scoring candidates costs the same for all methods and is left out."""
        sessions = self.recipe.model.sessions
        widths = {"scenario": len(SCENARIO), "place": len(PLACE), "feedback": len(FEEDBACK), "via": len(PLACE)}
        batch = {name: torch.ones(1, sessions, width, dtype=torch.int32) for name, width in widths.items()}
        batch["profile"] = torch.ones(1, PROFILE_TOKENS, dtype=torch.int32)
        batch["mask"] = torch.ones(1, sessions, dtype=torch.bool)
        return (batch,)


@lru_cache(maxsize=2)
def open_data(data: TravelData) -> JourneyData:
    """The journeys that the settings describe; generated ones are made once a process."""
    if data.source == "journeys":
        if data.path is not None:
            raise DataError(f"data.path={data.path!r}: journeys are generated and take no path")
        return make_journeys(users=data.users)
    if data.path is None:
        raise DataError(
            "data.path is not set: give --data.path FOLDER, made by intbmoe prepare inttravel (docs/data.md)"
        )
    from intbmoe.tasks.travel.store import open_journeys

    return open_journeys(data.path)


def _cross_entropy(scores: Tensor) -> Tensor:
    """The sum over sessions; 0, with a gradient of 0, where there is none."""
    return F.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.int64), reduction="sum")


def ranking_sums(scores: Tensor) -> dict[str, Tensor]:
    """(N, C) scores, the true place's first → sums over the N rows: count, hits at 1 and at 5, gain at 5.

    The rank is one more than the places that do not score lower: ties count against, and so does what is no number.
    """
    rank = 1 + (~(scores[:, 1:] < scores[:, :1])).sum(1)
    gain = torch.where(rank <= TOP, 1 / torch.log2(1 + rank.double()), 0.0)
    return {
        "count": torch.tensor(len(scores), device=scores.device),
        "hits1": (rank == 1).sum(),
        "hits5": (rank <= TOP).sum(),
        "gain5": gain.sum(),
    }
