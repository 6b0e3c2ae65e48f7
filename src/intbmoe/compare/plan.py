"""Which runs a comparison consists of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from intbmoe.checks import did_you_mean, require
from intbmoe.recipes.sets import Options, Variant, find_variants
from intbmoe.report.trace import find_flaw
from intbmoe.settings import Checked, PositiveInt
from intbmoe.tasks import find_task, make_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train import RunDirectory, TrainingError
from intbmoe.train.run import FREE_TO_CHANGE, differing_settings


@dataclass(frozen=True)
class CompareOptions(Checked):
    """Options of ``compare`` besides the recipe's settings."""

    methods: str = "all"
    """Methods and sets, with commas or spaces: all, everything, ablations, compute, place, K, k, E, L, switch, …"""
    seeds: PositiveInt = 1
    """Runs per method, with the first of the recipe's seeds; two or more give an interval."""
    baseline: str | None = None
    """The method that all others are compared with in pairs; None for dense or, without it, the first method."""
    jobs: PositiveInt | None = None
    """Runs side by side; None for as many as cores, memory and GPUs allow."""
    root: Path = Path("runs")
    """Where runs are kept."""
    device: str | None = None
    """cpu, cuda or cuda:1, for all runs; None for all GPUs, or the CPU if there are none."""
    tune: tuple[str, ...] = ()
    """Try every combination with the first seed; each method keeps its best on validation: train.lr=1e-3,2e-3"""


@dataclass(frozen=True)
class Job:
    variant: Variant
    recipe: Recipe
    run: RunDirectory

    @property
    def seed(self) -> int:
        return self.recipe.train.seed

    @property
    def title(self) -> str:
        return f"{self.variant.title}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    folder: Path  # where logs and results go
    jobs: list[Job]
    refused: dict[str, str]  # titles of variants that the task does not accept, and why
    largest: int  # parameters of the largest model


def make_plan(recipe: Recipe, options: CompareOptions, own: Options | None = None) -> Plan:
    """Return all runs of the comparison; raise if a run with other settings is in the place of one.

    ``own`` are options of methods other than the recipe's.
    """
    jobs, refused, largest = [], {}, 0
    for variant in find_variants(recipe, options.methods, own):
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
            require_same(run, seeded)
            jobs.append(Job(variant, seeded, run))
    return Plan(recipe, options.root / recipe.name / "compare", jobs, refused, largest)


def choose_baseline(jobs: Sequence[Job], wanted: str | None) -> str | None:
    """Return the label of the method that the others are compared with; None if there are no runs."""
    labels = list(dict.fromkeys(job.variant.label for job in jobs))
    if wanted is not None and labels:
        require(wanted in labels, "baseline", wanted, f"one of the methods compared: {did_you_mean(wanted, labels)}")
        return wanted
    return "dense" if "dense" in labels else labels[0] if labels else None


def choose_seeds(named: Sequence[int], number: int) -> list[int]:
    """Return the first of the recipe's seeds; beyond them, the smallest integers that are not among them."""
    return list(dict.fromkeys([*named, *range(len(named) + number)]))[:number]


def require_same(run: RunDirectory, recipe: Recipe) -> None:
    """Raise if the run has other settings: it must not be in the table."""
    if not run.begun or not run.config_path.is_file():
        return
    try:
        differing = differing_settings(run.recipe, recipe, free=FREE_TO_CHANGE)
    except TrainingError:
        return  # a damaged run: if it is finished it is left out of the result, otherwise its training says why
    if differing:
        listed = ", ".join(f"{key} {old!r} there, {new!r} now" for key, (old, new) in differing.items())
        raise ValueError(
            f"{run.path} holds a run with other settings ({listed}): give this comparison its own name "
            f"(--name) or another --root, or remove that folder"
        )


def sort_out(jobs: Iterable[Job]) -> tuple[list[Job], list[dict[str, str]]]:
    """Return the runs that can be reported, and the title, path and problem of the others."""
    sound, left_out = [], []
    for job in jobs:
        flaw = find_flaw(job.run, find_task(job.recipe.task).metric)
        if flaw is None:
            sound.append(job)
        else:
            left_out.append({"title": job.title, "path": str(job.run.path), "reason": flaw})
    return sound, left_out
