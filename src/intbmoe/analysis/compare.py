"""``intbmoe compare``: train variants of one recipe over seeds, and say how they did and what they cost.

plan       which runs there are to be, which of them are finished, which variants the task refuses
train      the others side by side (``compare_jobs.py``); each is an ordinary run, resumed if it was broken off
summarise  mean and 95 % interval of the deciding metric on the test split; Params, Activated and FLOPs, counted on
           the trained model
report     table, CSV, JSON, Markdown, picture (``compare_report.py``)
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from intbmoe.analysis.cost import Counts, count
from intbmoe.analysis.settings import IMAGENET, class_token_ffns
from intbmoe.layer import moe_layers
from intbmoe.models.vit import ViT
from intbmoe.precomposition import precompose
from intbmoe.recipes import recipe_to_dict
from intbmoe.recipes.sets import Variant, find_variants
from intbmoe.routing import record_routing
from intbmoe.settings import Checked, PositiveInt
from intbmoe.tasks import Task, make_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train import RunDirectory, TrainingError, load
from intbmoe.train.run import FREE_TO_CHANGE, differing_settings

ROUTED_EXAMPLES = 64
"""Test examples on which the experts of a token are counted, where a trained router decides on their number."""
# fmt: off
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
"""Student's t at 97.5 %, for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class CompareOptions(Checked):
    """What ``compare`` takes beside the recipe's settings."""

    methods: str = "all"
    """Methods and sets, with commas between them: all, ablations, compute, place, K, k, E, L, switch,intbmoe, …"""
    seeds: PositiveInt = 1
    """Runs of each, over the recipe's seeds from the first on; with two or more there is an interval."""
    jobs: PositiveInt | None = None
    """Runs side by side; None for as many as cores, memory and GPUs allow."""
    root: Path = Path("runs")
    """Where runs are kept."""


@dataclass(frozen=True)
class Job:
    """One run of the comparison."""

    variant: Variant
    recipe: Recipe
    run: RunDirectory

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.recipe.train.seed

    @property
    def title(self) -> str:
        """For a line of progress."""
        return f"{self.variant.title}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """What is to be compared."""

    recipe: Recipe
    folder: Path
    """Where logs and results go."""
    jobs: list[Job]
    refused: dict[str, str]
    """Titles of variants that the task does not take, and why."""
    largest: int
    """Parameters of the largest model."""


def make_plan(recipe: Recipe, options: CompareOptions) -> Plan:
    """All runs of the comparison; raises if one stands in its place with other settings."""
    jobs, refused, largest = [], {}, 0
    for variant in find_variants(recipe, options.methods):
        varied = replace(recipe, moe=variant.moe)
        try:
            model = make_task(varied).make_model()
        except (ValueError, TypeError) as error:
            refused[variant.title] = str(error)
            continue
        largest = max(largest, sum(parameter.numel() for parameter in model.parameters()))
        del model
        for seed in choose_seeds(recipe.seeds, options.seeds):
            seeded = replace(varied, train=replace(recipe.train, seed=seed))
            run = RunDirectory.of(seeded, options.root)
            _require_same(run, seeded)
            jobs.append(Job(variant, seeded, run))
    return Plan(recipe, options.root / recipe.name / "compare", jobs, refused, largest)


def choose_seeds(named: Sequence[int], number: int) -> list[int]:
    """The first of the recipe's seeds; beyond them the smallest integers that are not among them."""
    seeds = list(dict.fromkeys(named))
    candidate = 0
    while len(seeds) < number:
        if candidate not in seeds:
            seeds.append(candidate)
        candidate += 1
    return seeds[:number]


def _require_same(run: RunDirectory, recipe: Recipe) -> None:
    """A finished run of other settings may not stand in the table."""
    if not run.begun or not run.config_path.is_file():
        return
    try:
        there = recipe_to_dict(run.recipe)
    except TrainingError:
        return  # a damaged run: if it counts as finished it is left out of the result, else its training says why
    differing = differing_settings(there, recipe)
    differing = {key: values for key, values in differing.items() if key not in FREE_TO_CHANGE}
    if differing:
        listed = ", ".join(f"{key} {old!r} there, {new!r} now" for key, (old, new) in differing.items())
        raise ValueError(
            f"{run.path} holds a run with other settings ({listed}): give this comparison a name of its own "
            f"(--name) or another --root, or remove that folder"
        )


class Shares(NamedTuple):
    """A layer's participation, execution and materialization (``layer.quantities()``), as means over the layers."""

    participation: float
    execution: float
    materialization: float


@dataclass(frozen=True)
class Summary:
    """One row of the result."""

    title: str
    label: str
    method: str
    seeds: tuple[int, ...]
    metric: str
    values: tuple[float, ...]
    """The deciding metric on the test split, a value a seed; empty for a precomposed form, which is not trained."""
    results: tuple[dict[str, Any], ...]
    counts: Counts
    active: float | None
    """Experts a token had on average, where the trained router decides."""
    shares: Shares

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % interval; None with fewer than two seeds."""
        return confidence_interval(self.values)

    @property
    def seconds(self) -> float | None:
        """Mean time of a run."""
        return statistics.fmean(result["seconds"] for result in self.results) if self.results else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON and CSV: raw numbers."""
        return {
            "title": self.title,
            "label": self.label,
            "method": self.method,
            "seeds": list(self.seeds),
            "metric": self.metric,
            "values": list(self.values),
            "mean": self.mean,
            "interval_95": self.interval,
            **self.counts._asdict(),
            **self.shares._asdict(),
            "active_experts": self.active,
            "seconds": self.seconds,
            "results": list(self.results),
        }


def confidence_interval(values: Sequence[float]) -> float | None:
    """Half the width of Student's 95 % interval for the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else _late_quantile(freedom)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _late_quantile(freedom: int) -> float:
    """Cornish and Fisher's expansion from the normal quantile, right to three digits from 30 degrees on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def summarise(jobs: Iterable[Job]) -> list[Summary]:
    """The finished jobs, a row for each variant, and one for IntBMoE's precomposed form."""
    by_label: dict[str, list[Job]] = {}
    for job in jobs:
        if job.run.finished:
            by_label.setdefault(job.variant.label, []).append(job)
    summaries = []
    for label, members in by_label.items():
        first = members[0]
        task = make_task(first.recipe)
        results = tuple(job.run.result for job in members)
        model = load(first.run).cpu()
        active = active_experts(task, model) if first.variant.moe.name in IMAGENET.active else None
        summary = Summary(
            title=first.variant.title,
            label=label,
            method=first.variant.moe.name,
            seeds=tuple(job.seed for job in members),
            metric=task.metric,
            values=tuple(result["test"][task.metric] for result in results),
            results=results,
            counts=_count(task, _untrained(task) if active else model, active),
            active=active,
            shares=shares_of(model, active),
        )
        summaries.append(summary)
        if label == "intbmoe":
            counts = _count(task, precompose(model), None)
            summaries.append(
                replace(summary, title=f"{summary.title}, precomposed", values=(), results=(), counts=counts)
            )
    return summaries


def shares_of(model: nn.Module, active: float | None) -> Shares:
    """Means over the model's MoE layers; ``active`` experts where the trained router decides on their number."""
    found = [layer.quantities() for _, layer in moe_layers(model)]
    if not found:
        return Shares(1, 1, 0)  # a plain FFN is one expert that every token has
    means = Shares(*(statistics.fmean(column) for column in zip(*found, strict=True)))
    return means if active is None else means._replace(participation=active, execution=active)


def _untrained(task: Task) -> nn.Module:
    """A model to count on where the number of experts is given: its router has some for any input.

    A trained one may have none for the example it is counted on, and then the cost of an expert cannot be seen.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return task.make_model()


def _count(task: Task, model: nn.Module, active: float | None) -> Counts:
    set_aside = class_token_ffns(model) if isinstance(model, ViT) else 0
    return count(model.eval(), task.example_inputs(), set_aside=set_aside, active=active or None)


@torch.no_grad()
def active_experts(task: Task, model: nn.Module) -> float:
    """Experts that a token of the test split has on average, over all layers."""
    test = task.split("test")
    batch = test.batch(range(min(ROUTED_EXAMPLES, len(test))), epoch=0, seed=0)
    with record_routing(model.eval()) as log:
        task.evaluate(model, task.prepare(batch, None))
    choices = [record.ids for record in log.values()]
    return sum(int((ids >= 0).sum()) for ids in choices) / sum(len(ids) for ids in choices)
