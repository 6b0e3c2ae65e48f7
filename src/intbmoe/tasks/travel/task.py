"""Where a user goes next: IntTravel's "where" task, on its own data and on embedded journeys.

The destination of each target session is ranked against 64 other places (``candidates.py``). HR@n is the share
of targets whose true place is among the first n, NDCG@5 the mean of 1/log₂(1 + rank) over those within the first five.
A place that scores as high as the true one is ranked before it.

In an artifact, ``catalogue.json`` has sizes: codes of each field; utc_offset: hours that the users' clocks are ahead of
UTC. ``catalogue.safetensors`` has ids (P,), the places' own ids, rising; codes (1 + P, 5), a place's codes in row p + 1
and row 0 for none; values.FIELD, the original value of code 1, 2, … of a field, where the data had other values. Graphs
take profile (B, 6), scenario (B, S, 6), place (B, S, 5), feedback (B, S, 2), via (B, S, 5) and mask (B, S). They give
the scores (B, places) of all places of the catalogue for the last session of each sequence, of which only the scenario
is known; the vectors of the places are part of the graph.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.models.travel import FEEDBACK, PLACE, PROFILE_TOKENS, SCENARIO, TravelConfig, TravelModel
from intbmoe.precision import wide
from intbmoe.registry import register_task
from intbmoe.settings import Checked, MustBe, PositiveInt
from intbmoe.tasks.base import Batch, Examples, Task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.looking import Shown, View
from intbmoe.tasks.mixture import ffn_maker
from intbmoe.tasks.preparation import Preparation
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.serving import Catalogue, Graph, Request
from intbmoe.tasks.travel.city import CATEGORY_NAMES
from intbmoe.tasks.travel.data import JourneyData
from intbmoe.tasks.travel.examples import JourneyExamples, JourneyReader, place_codes
from intbmoe.tasks.travel.floors import floor_scores
from intbmoe.tasks.travel.generator import make_journeys
from intbmoe.tasks.travel.looking import journey_views, show_journeys
from intbmoe.tasks.travel.serving import PlacePredictor, journey_requests
from intbmoe.tasks.travel.store import open_journeys

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


@register_task("travel")
class TravelTask(Task):
    recipe_type: ClassVar[type[Recipe]] = TravelRecipe
    metric = "HR@5"
    higher_is_better = True
    causal = True
    preparations: ClassVar[Mapping[str, Preparation]] = {
        "inttravel": Preparation("a folder with IntTravel's four tables", "intbmoe.tasks.travel.inttravel:prepare")
    }
    predictor = PlacePredictor

    def __init__(self, recipe: TravelRecipe) -> None:
        super().__init__(recipe)
        self._splits: dict[str, JourneyExamples] = {}

    def make_model(self) -> nn.Module:
        config = self.recipe.model
        return TravelModel(config, ffn_maker(self.recipe.moe, config.dim, config.hidden, domain="language"))

    def read_split(self, name: str) -> Examples:
        """``train`` (sessions before all others), ``valid`` or ``test`` (the last ones), by time."""
        if name not in self._splits:  # finding the windows reads the times of all sessions
            at_most = self.recipe.data.valid_windows if name == "valid" else None
            self._splits[name] = JourneyExamples(self._reader, name, at_most)
        return self._splits[name]

    @cached_property
    def _reader(self) -> JourneyReader:
        data = self.recipe.data
        return JourneyReader(open_data(data), self.recipe.model.sessions, data.utc_offset)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return _cross_entropy(model(batch)), batch["targets"].sum()

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        scores = model(batch)
        return {"loss": _cross_entropy(scores), **ranking_sums(scores)}

    def floors(self) -> Mapping[str, Mapping[str, float]]:
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

    def run_model(self, model: nn.Module, batch: Batch, dtype: torch.dtype) -> Tensor:
        return model(batch)

    def catalogue(self) -> Catalogue:
        settings = self.recipe.data
        data = open_data(settings)
        tensors = {
            "ids": torch.from_numpy(np.array(data.places.ids, np.int64)),
            "codes": torch.from_numpy(place_codes(data.places)),
        }
        if settings.path is not None:
            for file in sorted((Path(settings.path).expanduser() / "codes").glob("*.npy")):
                tensors[f"values.{file.stem}"] = torch.from_numpy(np.load(file, allow_pickle=False))
        sizes = {name: list(size) if isinstance(size, tuple) else size for name, size in asdict(data.sizes).items()}
        return Catalogue({"sizes": sizes, "utc_offset": settings.utc_offset}, tensors)

    def golden_requests(self, predictor: PlacePredictor, count: int) -> list[Request]:
        return journey_requests(predictor, self.split("valid"), count)

    def graph(self) -> Graph:
        return Graph(
            ("profile", "scenario", "place", "feedback", "via", "mask"),
            "sessions",
            self.recipe.model.sessions,
            whole=("profile",),
            wrap=lambda model, catalogue: TravelScores(model, catalogue["codes"][1:]).eval(),
        )

    def category_names(self) -> tuple[str, ...]:
        """The categories of places, code 1 first: names where the embedded journeys have them all, else codes."""
        data = self.recipe.data
        known = open_data(data).sizes.categories - 1
        if data.source == "journeys" and known == len(CATEGORY_NAMES):
            return CATEGORY_NAMES
        return tuple(map(str, range(1, known + 1)))

    def views(self) -> list[View]:
        return journey_views(self.category_names())

    def shown(self, split: JourneyExamples) -> Shown:
        return show_journeys(split, self.category_names())


class TravelScores(nn.Module):
    """Sessions to the scores of all places, for each sequence's last session; padding stands after the sessions."""

    def __init__(self, model: TravelModel, codes: Tensor) -> None:
        super().__init__()
        self.model = model
        with torch.no_grad():
            self.vectors = wide(model.encode_places(codes)) * model.config.dim**-0.5

    def forward(
        self, profile: Tensor, scenario: Tensor, place: Tensor, feedback: Tensor, via: Tensor, mask: Tensor
    ) -> Tensor:
        sessions = {"scenario": scenario, "place": place, "feedback": feedback, "via": via, "mask": mask}
        predictions = self.model.predict({"profile": profile, **sessions})
        last = (mask.sum(1) - 1).view(-1, 1, 1).expand(-1, 1, predictions.shape[2])
        return F.linear(wide(predictions.gather(1, last).squeeze(1)), self.vectors)


@lru_cache(maxsize=2)
def open_data(data: TravelData) -> JourneyData:
    """The journeys that the settings describe; generated ones are made once a process."""
    if data.source == "journeys":
        if data.path is not None:
            raise DataError(f"data.path={data.path!r}: journeys are generated and take no path")
        return make_journeys(users=data.users)
    if data.path is None:
        raise DataError("data.path is not set: give --data.path FOLDER made by intbmoe prepare inttravel, docs/data.md")
    return open_journeys(data.path)


def _cross_entropy(scores: Tensor) -> Tensor:
    """The sum over sessions; 0, with a gradient of 0, where there is none."""
    return F.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.int64), reduction="sum")


def ranking_sums(scores: Tensor) -> dict[str, Tensor]:
    """(N, C) scores, the true place's first → sums over the rows; ties, and what is no number, count against."""
    rank = 1 + (~(scores[:, 1:] < scores[:, :1])).sum(1)
    return {
        "count": torch.tensor(len(scores), device=scores.device),
        "HR@1": (rank == 1).sum(),
        "HR@5": (rank <= TOP).sum(),
        "NDCG@5": torch.where(rank <= TOP, 1 / torch.log2(1 + rank.double()), 0.0).sum(),
    }
