"""``compare --tune``: each method trains with its own best settings of those tried, chosen on the validation split.

Methods differ in the learning rate and the warm-up that suit them, so settings that all share favour some. Every
combination of the given values is trained with the first seed; the best is then trained with the other seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from intbmoe.checks import did_you_mean, require
from intbmoe.compare.plan import Job, Plan, choose_seeds, require_same, sort_out
from intbmoe.recipes import override, recipe_to_dict
from intbmoe.report.numbers import NOTHING, format_metric
from intbmoe.report.tables import Cell, Column, Table
from intbmoe.tasks import find_task, make_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train import RunDirectory
from intbmoe.train.run import FREE_TO_CHANGE

Settings = Mapping[str, Any]  # by dotted name, such as train.lr
FIXED = ("train.seed", *FREE_TO_CHANGE)
"""Settings that the comparison sets itself, or that change nothing."""


class Trial(NamedTuple):
    settings: Settings
    told: str  # lr 0.001, warmup 0.5
    job: Job


def read_grid(recipe: Recipe, texts: Sequence[str]) -> list[Settings]:
    """Return every combination of the values in ``texts``, such as ``train.lr=1e-3,2e-3``."""
    tried: dict[str, list[Any]] = {}
    known = [f"train.{name}" for name in recipe_to_dict(recipe)["train"] if f"train.{name}" not in FIXED]
    for text in texts:
        name, _, values = text.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name not in known:
            raise ValueError(f"--tune {text}: {name!r} is not a setting to tune: {did_you_mean(name, known)}")
        require(name not in tried, "tune", text, f"the only list for {name}")
        tried[name] = [_value(value) for value in values.split(",") if value]
        require(len(set(tried[name])) > 1, "tune", text, f"{name}= with two or more values, such as train.lr=1e-3,2e-3")
    return [dict(zip(tried, values, strict=True)) for values in product(*tried.values())]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def plan_trials(plan: Plan, texts: Sequence[str], root: Path) -> list[Trial]:
    """Return a run of every method with every combination and the first seed.

    A run whose settings differ from the recipe's is in a folder of its own, named after them; the others are those of a
    comparison without ``--tune``.
    """
    grid = read_grid(plan.recipe, texts)
    if not len(make_task(plan.recipe).split("valid")):
        raise ValueError("--tune chooses on the validation split, but this recipe holds no examples out for it")
    first = choose_seeds(plan.recipe.seeds, 1)[0]
    jobs = [job for job in plan.jobs if job.seed == first]
    return [
        Trial(settings, told := _told(settings), _with(job, settings, root, f"{job.variant.title}, {told}"))
        for job in jobs
        for settings in grid
    ]


def _with(job: Job, settings: Settings, root: Path, title: str) -> Job:
    changed = override(job.recipe, settings)
    before, after = (recipe_to_dict(recipe)["train"] for recipe in (job.recipe, changed))
    keys = [name.rpartition(".")[2] for name in settings]
    own = [f"{key}{_text(after[key])}" for key in keys if after[key] != before[key]]
    recipe = replace(changed, name="-".join([changed.name, *own]))
    run = RunDirectory.of(recipe, root)
    require_same(run, recipe)
    return Job(replace(job.variant, title=title), recipe, run)


def _told(settings: Settings) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} {_text(value)}" for name, value in settings.items())


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def choose(plan: Plan, trials: Sequence[Trial], root: Path) -> tuple[Plan, dict[str, Any]]:
    """Return the plan with each method's best settings, and how they were found, as plain data for ``tuning_table``.

    A method without a usable trial is refused.
    """
    task = find_task(plan.recipe.task)
    sign = 1 if task.higher_is_better else -1
    usable = {id(job) for job in sort_out(trial.job for trial in trials)[0]}
    best, rows = {}, []
    for variant in {job.variant.label: job.variant for job in plan.jobs}.values():
        own = [trial for trial in trials if trial.job.variant.label == variant.label]
        valid = [t.job.run.result["valid"][task.metric] if id(t.job) in usable else None for t in own]
        known = [place for place, value in enumerate(valid) if value is not None]
        place = max(known, key=lambda place: sign * valid[place], default=None)
        if place is not None:
            best[variant.label] = own[place].settings
        rows.append({"title": variant.title, "values": valid, "chosen": None if place is None else own[place].told})
    chosen = [(job, best[job.variant.label]) for job in plan.jobs if job.variant.label in best]
    jobs = [_with(job, settings, root, job.variant.title) for job, settings in chosen]
    lost = {row["title"]: "no run of its tuning can be used" for row in rows if row["chosen"] is None}
    found = {
        "metric": task.metric,
        "seed": trials[0].job.seed,
        "settings": list(dict.fromkeys(trial.told for trial in trials)),
        "rows": rows,
        "edges": edges([trial.settings for trial in trials], list(best.values())),
    }
    return replace(plan, jobs=jobs, refused={**plan.refused, **lost}), found


def edges(tried: Sequence[Settings], best: Sequence[Settings]) -> list[str]:
    """Say where most methods are best at the largest or smallest value, because a better one may lie beyond."""
    told = []
    for name in tried[0]:
        values = {settings[name] for settings in tried}
        if not all(isinstance(value, int | float) for value in values):
            continue
        for end, side, beyond in ((max(values), "largest", "larger"), (min(values), "smallest", "smaller")):
            count = sum(settings[name] == end for settings in best)
            if 2 * count > len(best) and (end or side == "largest"):
                told.append(
                    f"{count} of {len(best)} methods are best at the {side} {name} tried, {_text(end)}: try {beyond} "
                    "ones too."
                )
    return told


def tuning_table(found: Mapping[str, Any]) -> Table:
    """Tabulate what each method reaches on the validation split with each combination, and which it gets."""
    cells = [
        [
            Cell(row["title"], row["title"]),
            *(
                Cell("failed") if value is None else Cell(format_metric(found["metric"], value, None), value)
                for value in row["values"]
            ),
            Cell(row["chosen"] or NOTHING),
        ]
        for row in found["rows"]
    ]
    heading = [Column("Method", numeric=False), *map(Column, found["settings"]), Column("chosen", numeric=False)]
    note = f"Each method gets the settings that are best on the validation split with seed {found['seed']}."
    title = f"Tuning: {found['metric']} on the validation split"
    return Table(title, heading, cells, notes=[note, *found["edges"]])
