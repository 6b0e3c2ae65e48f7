"""What a comparison's page shows, as data: rows, runs with their traces, curves, sets, what is left out."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from intbmoe.compare.plan import Job, Plan
from intbmoe.recipes.sets import SETS
from intbmoe.report.trace import trace_run
from intbmoe.tasks import find_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.metrics import LOAD_RATIOS

GRIDS = ("K", "k", "E", "L")
ABLATIONS = "ablations"
MOST_POINTS = 400  # of one curve; a picture has no more pixels, and metrics.jsonl has all


@dataclass(frozen=True)
class Comparison:
    plan: Plan
    sound: Sequence[Job]
    rows: Sequence[Mapping[str, Any]]  # of ``Summary.record``
    floors: Mapping[str, Mapping[str, float]]
    left_out: Sequence[Mapping[str, str]]
    methods: str  # as ``--methods`` named them
    command: str


def collect(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """What is written: file name → content."""
    plan = comparison.plan
    task = find_task(plan.recipe.task)
    refused = [{"title": title, "path": "", "reason": reason} for title, reason in plan.refused.items()]
    described = {
        "recipe": plan.recipe.name,
        "task": plan.recipe.task,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "methods": comparison.methods,
        "command": comparison.command,
        "rows": [{key: row[key] for key in row if key != "results"} for row in comparison.rows],
        "sets": _sets(plan.recipe, comparison.methods),
        "floors": {name: dict(values) for name, values in comparison.floors.items()},
        "runs": [_run(job, plan) for job in comparison.sound],
        "left_out": [*comparison.left_out, *refused],
    }
    return {"comparison": described, "curves": {"curves": _curves(comparison.sound)}}


def _run(job: Job, plan: Plan) -> dict[str, Any]:
    link = os.path.relpath(job.run.path, plan.folder / "a page's folder").replace(os.sep, "/")
    about = {"title": job.variant.title, "label": job.variant.label}
    return {**about, "path": str(job.run.path), "link": f"{link}/", **trace_run(job.run)}


def _sets(recipe: Recipe, methods: str) -> dict[str, list[dict[str, Any]]]:
    """The sensitivity grids and ablations that were asked for by name: in order, value or title and label."""
    asked = [name.strip() for name in methods.split(",")]
    found = {}
    for name in (*GRIDS, ABLATIONS):
        if name in asked:
            variants = SETS[name].make(recipe)
            found[name] = [{"title": v.title, "value": v.title.rpartition("= ")[2], "label": v.label} for v in variants]
    return found


def _curves(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Losses, the deciding metric and the loads of every run, thinned out."""
    found = []
    for job in jobs:
        metric = find_task(job.recipe.task).metric
        wanted = {("train", "loss"), ("valid", "loss"), ("valid", metric), *(("train", name) for name in LOAD_RATIOS)}
        points: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for line in job.run.metrics():
            for name, value in line.items():
                if (line["split"], name) in wanted:
                    points.setdefault((line["split"], name), []).append((line["step"], value))
        for (split, name), curve in points.items():
            steps, values = zip(*thin(curve, MOST_POINTS), strict=True)
            about = {"title": job.variant.title, "label": job.variant.label, "seed": job.seed}
            found.append({**about, "split": split, "name": name, "steps": list(steps), "values": list(values)})
    return found


def thin(points: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the points, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]
