"""``compare --tune``: each method trains with its own best settings of those tried, chosen on the validation split.

Methods differ in the learning rate and the warm-up that suit them, so settings that all share favour some. Every
combination of the given values is trained with the first seed; the best is then trained with the other seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from intbmoe.compare.plan import Job, Plan, choose_seeds, require_same
from intbmoe.recipes import override
from intbmoe.report.numbers import NOTHING, format_metric
from intbmoe.report.tables import Cell, Column, Table
from intbmoe.settings import field_types, from_plain
from intbmoe.tasks import find_task, make_task
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train import RunDirectory

TUNABLE = tuple(
    f"train.{name}"
    for name in ("lr", "warmup", "warmup_lr", "final_lr", "cooldown", "schedule", "weight_decay", "clip")
)
"""Settings that leave the data, its order and the amount of training as they are."""
DIVERGED = "Training has diverged"
"""In the output of a trial whose settings are simply not chosen; every other failure is one of the comparison."""
Settings = Mapping[str, Any]  # by dotted name, such as train.lr


class Trial(NamedTuple):
    settings: Settings
    told: str  # lr 0.001, warmup 0.5
    job: Job


def read_grid(texts: Sequence[str]) -> list[Settings]:
    """Return every combination of the values in ``texts``, such as ``train.lr=1e-3,2e-3``."""
    tried: dict[str, list[Any]] = {}
    for text in texts:
        written, _, values = text.partition("=")
        name = written.strip().lstrip("-").replace("-", "_")
        if name not in TUNABLE:
            raise ValueError(f"--tune {text}: {written!r} cannot be tuned, only {', '.join(TUNABLE)}")
        if name in tried:
            raise ValueError(f"--tune {text}: {name} is already tuned: write all of its values into one list")
        tried[name] = [_value(name, value.strip()) for value in values.split(",") if value.strip()]
        if len(tried[name]) < 2 or len(set(tried[name])) < len(tried[name]):
            raise ValueError(f"--tune {text}: give two or more different values, such as {name}=1e-3,2e-3")
    return [dict(zip(tried, values, strict=True)) for values in product(*tried.values())]


def _value(name: str, text: str) -> Any:
    """Return the value as the recipe has it, so that equal values are equal however they are written."""
    try:
        found: Any = float(text)
    except ValueError:
        found = None if text.lower() == "none" else text
    field = name.removeprefix("train.")
    return from_plain(field_types(TrainSettings)[field], found, f"--tune {field}")


def plan_trials(plan: Plan, texts: Sequence[str], root: Path) -> list[Trial]:
    """Return a run of every method with every combination and the first seed.

    A run whose settings differ from the recipe's is in a folder of its own, named after them; the others are those of a
    comparison without ``--tune``.
    """
    grid = read_grid(texts)
    if not len(make_task(plan.recipe).split("valid")):
        raise ValueError("--tune chooses on the validation split, but this recipe holds no examples out for it")
    first = choose_seeds(plan.recipe.seeds, 1)[0]
    tried = [
        Trial(settings, told := _told(settings), _with(job, settings, root, f"{job.variant.title}, {told}"))
        for job in plan.jobs
        for settings in grid
    ]  # of all seeds, because a run that is in the way must be found before anything is trained
    return [trial for trial in tried if trial.job.seed == first]


def _with(job: Job, settings: Settings, root: Path, title: str) -> Job:
    changed = override(job.recipe, settings)
    own = [
        f"{name.removeprefix('train.')}{_text(value)}"
        for name, value in settings.items()
        if value != getattr(job.recipe.train, name.removeprefix("train."))
    ]
    recipe = replace(changed, name="-".join([changed.name, *own]))
    run = RunDirectory.of(recipe, root)
    require_same(run, recipe)
    return Job(replace(job.variant, title=title), recipe, run)


def _told(settings: Settings) -> str:
    return ", ".join(f"{name.removeprefix('train.')} {_text(value)}" for name, value in settings.items())


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def choose(plan: Plan, trials: Sequence[Trial], sound: Sequence[Job], root: Path) -> tuple[Plan, dict[str, Any]]:
    """Return the plan with each method's best settings, and how they were found, as plain data for ``tuning_table``.

    Only ``sound`` jobs count. Of equal results, the first combination wins. A method without any is refused.
    """
    task = find_task(plan.recipe.task)
    usable, sign = {id(job) for job in sound}, 1 if task.higher_is_better else -1
    best: dict[str, Settings] = {}
    rows = []
    for variant in {job.variant.label: job.variant for job in plan.jobs}.values():
        own = [trial for trial in trials if trial.job.variant.label == variant.label]
        valid = [_validated(trial.job, task.metric) if id(trial.job) in usable else None for trial in own]
        known = [(sign * value, trial) for value, trial in zip(valid, own, strict=True) if value is not None]
        chosen = max(known, key=lambda pair: pair[0], default=(None, None))[1]
        if chosen is not None:
            best[variant.label] = chosen.settings
        rows.append(
            {
                "title": variant.title,
                "label": variant.label,
                "values": valid,
                "chosen": None if chosen is None else chosen.told,
                "edges": edges([(value, trial.settings) for value, trial in known]),
            }
        )
    chosen_jobs = [(job, best[job.variant.label]) for job in plan.jobs if job.variant.label in best]
    jobs = [_with(job, settings, root, job.variant.title) for job, settings in chosen_jobs]
    lost = {row["title"]: "none of its runs with --tune can be used" for row in rows if row["chosen"] is None}
    found = {
        "metric": task.metric,
        "seed": trials[0].job.seed,
        "settings": [trial.told for trial in trials if trial.job.variant.label == trials[0].job.variant.label],
        "rows": rows,
    }
    return replace(plan, jobs=jobs, refused={**plan.refused, **lost}), found


def _validated(job: Job, metric: str) -> float | None:
    value = (job.run.result.get("valid") or {}).get(metric)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def edges(known: Sequence[tuple[float, Settings]]) -> list[str]:
    """Say for which settings the best result is at the largest or smallest value: a better one may lie beyond.

    ``known`` are results, of which more is better, and their settings.
    """
    told = []
    best, chosen = max(known, key=lambda pair: pair[0], default=(0.0, {}))
    for name, value in chosen.items():
        tried = {settings[name] for _, settings in known}
        others = [result for result, settings in known if settings[name] != value]
        if not isinstance(value, float) or not all(isinstance(one, float) for one in tried) or not others:
            continue
        if max(others) < best and value in (min(tried), max(tried)) and value != 0:
            told.append(f"{'largest' if value == max(tried) else 'smallest'} {name} tried")
    return told


def tuning_table(found: Mapping[str, Any]) -> Table:
    """Tabulate what each method reaches on the validation split with each combination, and which it gets."""
    cells = []
    for row in found["rows"]:
        values = (
            Cell("failed") if value is None else Cell(format_metric(found["metric"], value, None), value)
            for value in row["values"]
        )
        cells.append([Cell(row["title"], row["title"]), *values, Cell(row["chosen"] or NOTHING)])
    heading = [Column("Method", numeric=False), *map(Column, found["settings"]), Column("chosen", numeric=False)]
    notes = [f"Each method gets the settings that are best on the validation split with seed {found['seed']}."]
    at_edge: dict[str, list[str]] = {}
    for row in found["rows"]:
        for edge in row["edges"]:
            at_edge.setdefault(edge, []).append(row["title"])
    notes += [f"Best at the {edge}, so try values beyond it: {', '.join(titles)}." for edge, titles in at_edge.items()]
    return Table(f"Tuning: {found['metric']} on the validation split", heading, cells, notes=notes)
