"""Where a user goes next: IntTravel's "where" task, on its own data and on embedded journeys, and three other tasks.

The destination of each target session is ranked against 64 other places (``candidates.py``). HR@n is the share of
targets whose true place is among the first n, NDCG@n the mean of 1/log₂(1 + rank), counting 0 beyond the first n.
CIR@n, the category inconsistency, is the share of targets with a known category for which none of the first n places
has that category. A place that scores as high as the true one is ranked before it.

The other tasks are those of the released data pipeline: "how" (travel mode) and "when" (hours until the user sets out)
of the session itself, and "via", the place of the next session. The loss is the sum of the tasks' sums over the number
of targets, so that each label weighs the same, whatever the batch.

In an artifact, ``catalogue.json`` has sizes, the number of codes of each field, and utc_offset, the hours that users'
clocks are ahead of UTC. ``catalogue.safetensors`` has ids (P,), the places' own ids, ascending; codes (1 + P, 5), a
place's codes in row p + 1 and row 0 for none; values.FIELD, the original values of codes 1, 2, … of a field, if the
data had other values; and, if the data has them, locations (P, 2), longitude and latitude in degrees or NaN, and names,
the UTF-8 of all names in sequence, with name_ends (P,), where each ends. Graphs take profile (B, 6), scenario
(B, S, 6), place (B, S, 5), feedback (B, S, 2), via (B, S, 5) and mask (B, S). They return the scores (B, places) of all
places of the catalogue for the last session of each sequence, of which only the scenario is known; the vectors of the
places are part of the graph, the heads of other tasks are not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.models.travel import FEEDBACK, PLACE, PROFILE_TOKENS, SCENARIO, TravelConfig, TravelModel
from intbmoe.precision import wide
from intbmoe.registry import register_task
from intbmoe.settings import Checked, MustBe, PositiveInt
from intbmoe.tasks.base import Batch, Examples, Task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.looking import Shown, View
from intbmoe.tasks.mixture import ffn_maker
from intbmoe.tasks.own_data import require_path
from intbmoe.tasks.preparation import Preparation
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.serving import Catalogue, Graph, Request
from intbmoe.tasks.travel.candidates import TOP
from intbmoe.tasks.travel.check_ins import read_check_ins
from intbmoe.tasks.travel.city import CATEGORY_NAMES
from intbmoe.tasks.travel.data import JourneyData
from intbmoe.tasks.travel.examples import JourneyExamples, JourneyReader, place_codes
from intbmoe.tasks.travel.floors import floor_scores
from intbmoe.tasks.travel.generator import make_journeys
from intbmoe.tasks.travel.looking import journey_views, show_journeys
from intbmoe.tasks.travel.planted import ceiling_sums, make_planted, make_rule
from intbmoe.tasks.travel.serving import PlacePredictor, journey_requests
from intbmoe.tasks.travel.store import open_journeys

CATEGORY_TOP = (1, 2, 5, 10)
HOW_TOP = 3


@dataclass(frozen=True, kw_only=True)
class TravelData(Checked):
    """Which journeys to use."""

    source: Literal["journeys", "inttravel", "check-ins"] = "journeys"
    """journeys come from a generator; docs/data.md says how to get IntTravel and check-ins."""
    path: str | None = None
    """The folder that intbmoe prepare inttravel made, or an .npz file of check-ins. journeys need none."""
    users: PositiveInt = 2000
    """How many users to generate."""
    planted: Annotated[float, MustBe("a number from 0 to 1", lambda value: 0 <= value <= 1)] = 0.0
    """The share of generated trips that follow a planted rule, while others go anywhere; 0 for the usual journeys."""
    tasks: Annotated[
        tuple[Literal["where", "how", "when", "via"], ...],
        MustBe("different ones, where among them", lambda value: "where" in value and len({*value}) == len(value)),
    ] = ("where",)
    """What to predict for a session: place (where), travel mode (how), hours until it (when), the next place (via)."""
    split: Literal["time", "newest"] = "time"
    """By time; or newest: each user's newest session is the test, the one before it validation, the rest training."""
    near_negatives: Annotated[int, MustBe("an integer from 0 to 64", lambda value: 0 <= value <= 64)] = 32
    """How many of the 64 negatives are in the true place's cell, if it has that many; the others are elsewhere."""
    valid_windows: PositiveInt | None = None
    """Windows of the validation split to evaluate, evenly spread over all; None for all."""
    utc_offset: Annotated[float, MustBe("a number between -14 and 14", lambda value: abs(value) <= 14)] = 0.0
    """Hours that users' clocks are ahead of UTC, if the data does not say; requests to a server never do."""


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
    reported: ClassVar = {"HR@1": "HR@1", "NDCG@5": "NDCG@5"}
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
        moe, tasks = self.recipe.moe, self.recipe.data.tasks
        ffn = head = ffn_maker(moe, config.dim, config.hidden, domain="language")
        if config.head_by_task:
            head = ffn_maker(moe, config.dim, config.hidden, domain="language", tasks=len(tasks))
        return TravelModel(config, ffn, tasks, head)

    def read_split(self, name: str) -> Examples:
        """Return ``train`` (the earliest sessions), ``valid``, or ``test`` (the last ones)."""
        if name not in self._splits:  # finding the windows reads the times of all sessions
            at_most = self.recipe.data.valid_windows if name == "valid" else None
            self._splits[name] = JourneyExamples(self._reader, name, at_most)
        return self._splits[name]

    @cached_property
    def _reader(self) -> JourneyReader:
        settings, model = self.recipe.data, self.recipe.model
        data = open_data(settings)
        unknown = sorted({"how", "when"} & {*settings.tasks})
        if unknown and (settings.planted or settings.source == "check-ins"):
            name = "planted journeys" if settings.planted else "check-ins"
            raise DataError(f"data.tasks has {', '.join(unknown)}, which {name} do not have: use only where and via")
        if "how" in settings.tasks and data.sizes.modes - 1 > model.modes:
            raise DataError(f"model.modes={model.modes}: the data has {data.sizes.modes - 1} travel modes, set that")
        options = {"departures": "when" in settings.tasks, "by": settings.split, "near": settings.near_negatives}
        return JourneyReader(data, model.sessions, settings.utc_offset, **options)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        losses = [_cross_entropy(scores, labels) for _, scores, labels in self._labelled(model, batch)]
        return sum(losses[1:], losses[0]), batch["targets"].sum()

    def evaluate_examples(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        for task, scores, labels in self._labelled(model, batch):
            start = 1 if task == "via" else 0  # "via" starts from the previous session
            asked = batch["targets"][:, start:]
            gains = {"loss": _cross_entropy(scores, labels, "none")}
            if task in ("where", "via"):
                candidates = batch["candidates"][:, start:][asked]
                gains |= ranking_gains(scores, candidates[..., PLACE.index("category")])
            else:
                gains |= class_gains(scores, labels, hours=task == "when")
            for name, gain in gains.items():
                sums = torch.zeros(asked.shape, dtype=torch.float64, device=gain.device)
                sums = sums.masked_scatter(asked, gain.double()).sum(1)
                found[name if task == "where" else f"{task} {name}"] = sums
        losses = [values for name, values in found.items() if name.split()[-1] == "loss"]
        if len(losses) > 1:
            found |= {"where loss": found["loss"], "loss": torch.stack(losses).sum(0)}
        return found

    def _labelled(self, model: nn.Module, batch: Batch) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (task, scores (N, C), the index of the right one (N,), −1 if unknown), "where" first."""
        scores = model(batch)
        for task, found in scores.items() if isinstance(scores, dict) else [("where", scores)]:
            if task in ("where", "via"):
                labels = found.new_zeros(len(found), dtype=torch.int64)
            else:
                codes = batch["depart"] if task == "when" else batch["feedback"][..., FEEDBACK.index("mode")]
                labels = codes[batch["targets"]].long() - 1
            yield task, found, labels

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Divide each sum by what it was summed over: ``count`` of its task, or the number of known categories."""
        require(sums["count"] > 0, "count", sums["count"], "positive: no example was evaluated")
        found = {}
        for name, total in sums.items():
            task, _, metric = name.rpartition(" ")
            if metric in ("count", "categories"):
                continue
            unit = f"{task} categories" if metric.startswith("CIR") else f"{task} count"
            number = sums[unit.removeprefix("where").strip()]
            if number or not metric.startswith("CIR"):  # without categories, 0 would look like the best value
                found[name] = float(total) / max(1.0, number)
        return found

    def floors(self) -> Mapping[str, Mapping[str, float]]:
        totals: dict[str, dict[str, float]] = {}
        settings = self.recipe.data
        for chunk, category in floor_scores(open_data(settings), settings.split, settings.near_negatives):
            for name, scores in chunk.items():
                sums = totals.setdefault(name, {})
                for key, gains in ranking_gains(torch.from_numpy(scores), torch.from_numpy(category)).items():
                    sums[key] = sums.get(key, 0.0) + float(gains.sum())
        return {name: self.metrics(sums) for name, sums in totals.items()}

    def ceilings(self) -> Mapping[str, Mapping[str, float]]:
        settings = self.recipe.data
        if not settings.planted:
            return {}
        sums = ceiling_sums(open_data(settings), make_rule(), settings.split, settings.near_negatives)
        return {"the planted rule": self.metrics(sums)}

    def example_inputs(self) -> tuple[dict[str, Tensor]]:
        """Return one full sequence; scoring candidates costs the same for all methods and is left out."""
        sessions = self.recipe.model.sessions
        widths = {"scenario": len(SCENARIO), "place": len(PLACE), "feedback": len(FEEDBACK), "via": len(PLACE)}
        batch = {name: torch.ones(1, sessions, width, dtype=torch.int32) for name, width in widths.items()}
        batch["profile"] = torch.ones(1, PROFILE_TOKENS, dtype=torch.int32)
        batch["mask"] = torch.ones(1, sessions, dtype=torch.bool)
        return (batch,)

    def run_model(self, model: nn.Module, batch: Batch, dtype: torch.dtype) -> Tensor:
        scores = model(batch)
        if not isinstance(scores, dict):
            return scores
        # In one row, each task's scores minus their mean: what all scores of a session have in common does not matter.
        return torch.cat([(part - part.mean(1, keepdim=True)).flatten() for part in scores.values()])

    def catalogue(self) -> Catalogue:
        settings = self.recipe.data
        data = open_data(settings)
        places = data.places
        arrays = {"ids": np.array(places.ids, np.int64), "codes": place_codes(places)}
        if places.longitude is not None:
            arrays["locations"] = np.stack([places.longitude, places.latitude], 1)
        if places.names is not None:
            names = places.names.tolist()
            arrays["names"] = np.frombuffer(b"".join(names) or b"\0", np.uint8).copy()
            arrays["name_ends"] = np.cumsum([len(name) for name in names])
        if settings.path is not None:
            for file in sorted((Path(settings.path).expanduser() / "codes").glob("*.npy")):
                arrays[f"values.{file.stem}"] = np.load(file, allow_pickle=False)
        sizes = {name: list(size) if isinstance(size, tuple) else size for name, size in asdict(data.sizes).items()}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
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
        """Return the categories of places, from code 1: names if the embedded journeys have all of them, else codes."""
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
    """From sessions to the scores of all places, for each sequence's last session; padding follows the sessions."""

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
    """Return the journeys that the settings describe; generated ones are made once per process."""
    if data.source == "journeys":
        if data.path is not None:
            raise DataError(f"data.path={data.path!r}: journeys are generated and need no path: leave it out")
        return make_planted(data.planted, data.users) if data.planted else make_journeys(users=data.users)
    if data.planted:
        raise DataError(
            f"data.planted={data.planted:g}: only generated journeys have it, leave it at 0 for {data.source}"
        )
    if data.source == "check-ins":
        return read_check_ins(data.path)
    what = "the folder that intbmoe prepare inttravel SOURCE FOLDER makes"
    return open_journeys(require_path(data.path, "inttravel", what, "docs/data.md"))


def _cross_entropy(scores: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """Cross-entropy over sessions with a label; 0, with a gradient of 0, if there are none."""
    return F.cross_entropy(scores, labels, ignore_index=-1, reduction=reduction)


def ranking_gains(scores: Tensor, category: Tensor) -> dict[str, Tensor]:
    """(N, C) scores and category codes, the true place's first → (N,) what each row adds to each metric.

    Ties and NaN count against the true place.
    """
    rank = 1 + (~(scores[:, 1:] < scores[:, :1])).sum(1)
    gain = 1 / torch.log2(1 + rank.double())
    gains = {"count": torch.ones_like(rank)}
    for top in TOP:
        gains[f"HR@{top}"] = rank <= top
        if top > 1:  # at 1 the two are the same
            gains[f"NDCG@{top}"] = torch.where(rank <= top, gain, 0.0)
    known = category[:, 0] > 0
    gains["categories"] = known
    # The true place is moved to the end: a stable order then puts it last among equals.
    order = scores.roll(-1, 1).argsort(dim=1, descending=True, stable=True)
    right = category.roll(-1, 1).gather(1, order) == category[:, :1]
    for top in CATEGORY_TOP:
        gains[f"CIR@{top}"] = known & ~right[:, :top].any(1)
    return gains


def class_gains(scores: Tensor, labels: Tensor, *, hours: bool) -> dict[str, Tensor]:
    """(N, C) scores, (N,) the right class, −1 if unknown → (N,) what each row adds; nothing if unknown."""
    known = labels >= 0
    best = scores.argmax(1)
    gains = {"count": known, "accuracy": best == labels}
    if hours:  # classes are hours: how far off the most likely one is
        return gains | {"hours-off": torch.where(known, (best - labels).abs(), 0)}
    top = scores.topk(min(HOW_TOP, scores.shape[1]), 1).indices
    return gains | {f"accuracy@{HOW_TOP}": (top == labels.unsqueeze(1)).any(1)}
