"""The results of the runs: how good each variant is, and what it costs."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from scipy.special import stdtrit
from torch import nn

from intbmoe.compare.pairs import Outcomes, compare_in_pairs, find_unsteady, resampled, spreads
from intbmoe.compare.plan import Job
from intbmoe.counting import Counts, count, shares_of
from intbmoe.models.vit import ViT, class_token_ffns
from intbmoe.precomposition import has_one_precomposed_form, precompose
from intbmoe.registry import find_method
from intbmoe.routing import record_routing
from intbmoe.tasks import Task, make_task
from intbmoe.train import load

Row = Mapping[str, Any]  # of a ``Summary``, or of a page's data
ROUTED_EXAMPLES = 64
"""Test examples on which to count the experts per token, where a trained router decides their number."""


class Summary(NamedTuple):
    """One variant, or its precomposed form, which is not trained and has no metrics."""

    row: dict[str, Any]
    """Plain data with all digits, from which tables, pictures and the page are made; without the intervals."""
    counts: Counts
    active: float | None  # average experts per token, if the trained router decides


def confidence_intervals(groups: Sequence[Sequence[float]], unsteady: Set[int] | None = None) -> list[float | None]:
    """Return half the width of Student's 95 % interval for the mean of each group (one value per seed), or None.

    Few seeds say little about their own spread (Student's factor for three is 4.3), so groups share one, pooled over
    them, except for unsteady ones (``pairs.spreads``). So even a single value has an interval, if another group has
    two.
    """
    return [
        float(stdtrit(spread.freedom, 0.975)) * spread.deviation / math.sqrt(len(group))
        if spread is not None and len(group)
        else None
        for group, spread in zip(groups, spreads(groups, unsteady), strict=True)
    ]


def add_differences(rows: Sequence[dict[str, Any]], jobs: Iterable[Job], baseline: str) -> None:
    """Add to each row its ``difference`` from the method labelled ``baseline``, and from the best mean (``to_best``).

    Both are on the same test examples. They are None for the method itself, and if a run kept no outcomes.
    """
    runs: dict[str, dict[int, Outcomes]] = {}
    for job in jobs:
        if (outcomes := job.run.outcomes()) is not None:
            runs.setdefault(job.variant.label, {})[job.seed] = outcomes
            task = make_task(job.recipe)
    trained = [row for row in rows if row["values"]]
    for row in rows:
        row["difference"] = row["to_best"] = None
    if not runs:
        return
    values = resampled(runs, metric := lambda sums: task.metrics(sums)[task.metric])
    best = (max if task.higher_is_better else min)(trained, key=lambda row: row["mean"])["label"]
    for name, label in (("difference", baseline), ("to_best", best)):
        found = compare_in_pairs(runs, label, metric, values) if label in runs else {}
        for row in trained:
            if difference := found.get(row["label"]):
                row[name] = {"baseline": label, **asdict(difference)}


def make_rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """Return the rows with the intervals of their means, which are computed over all rows together."""
    rows = [summary.row for summary in summaries]
    values = [row["values"] for row in rows]
    unsteady = {rows[place]["label"] for place in find_unsteady(values)}  # judged by their own spread in every column
    for row, interval in zip(rows, confidence_intervals(values), strict=True):
        row["interval_95"] = interval
    for name in dict.fromkeys(name for row in rows for name in row["metrics"]):
        having = [row for row in rows if name in row["metrics"]]
        values = [[result["test"][name] for result in row["results"]] for row in having]
        own = {place for place, row in enumerate(having) if row["label"] in unsteady}
        for row, interval in zip(having, confidence_intervals(values, own), strict=True):
            row["metrics"][name]["interval_95"] = interval
    return rows


def trained_rows(rows: Sequence[Row]) -> list[Row]:
    """Return all but the precomposed forms, which have the metrics of the models they were composed from."""
    return [row for row in rows if row["mean"] is not None]


def summarise(jobs: Iterable[Job]) -> list[Summary]:
    """Return one summary per finished variant, and one for the precomposed form of a plain method that has one."""
    by_label: dict[str, list[Job]] = {}
    for job in jobs:
        if job.run.finished:
            by_label.setdefault(job.variant.label, []).append(job)
    summaries = []
    for label, members in by_label.items():
        first = members[0]
        task, method = make_task(first.recipe), find_method(first.variant.moe.name)
        model = load(first.run).cpu()
        active = active_experts(task, model) if method.dynamic else None
        counts = _count(task, _untrained(task) if active else model, active)
        about = {"title": first.variant.title, "label": label, "method": method.name}
        about["seeds"] = [job.seed for job in members]
        shares = {**shares_of(model, task.example_inputs(), active)._asdict(), "active_experts": active}
        row = _row(task, about, {**counts._asdict(), **shares}, [job.run.result for job in members])
        summaries.append(Summary(row, counts, active))
        if method.composes and first.variant.moe.label is None and has_one_precomposed_form(model):
            counts = _count(task, precompose(model), None)
            about = {**about, "title": f"{first.variant.title}, precomposed"}
            summaries.append(Summary(_row(task, about, {**counts._asdict(), **shares}, []), counts, active))
    return summaries


def _row(
    task: Task, about: Mapping[str, Any], costs: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    tests = [result["test"] for result in results]
    values = [test[task.metric] for test in tests]
    names = [name for name in (tests[0] if tests else {}) if all(name in test for test in tests)]
    return {
        **about,
        "metric": task.metric,
        "values": values,
        "mean": statistics.fmean(values) if values else None,
        "interval_95": None,
        **costs,
        "seconds": statistics.fmean(result["seconds"] for result in results) if results else None,
        "results": list(results),
        "metrics": {
            name: {"mean": statistics.fmean(test[name] for test in tests), "interval_95": None} for name in names
        },
        "reported": dict(task.reported),
        "validated": all(result.get("valid") for result in results),
        "report": "best" if any(result.get("report") == "best" for result in results) else "last",
    }


def _untrained(task: Task) -> nn.Module:
    """Return an untrained model to count on if the number of experts is given: its router chooses some for any input.

    A trained router may choose none for the example, and then the cost of an expert cannot be seen.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return task.make_model()


def _count(task: Task, model: nn.Module, active: float | None) -> Counts:
    set_aside = class_token_ffns(model) if isinstance(model, ViT) else 0
    return count(model.eval(), task.example_inputs(), set_aside=set_aside, active=active or None, attention=True)


@torch.no_grad()
def active_experts(task: Task, model: nn.Module) -> float:
    """Return the average number of experts per valid token of the test split, over all layers."""
    test = task.split("test")
    batch = test.batch(range(min(ROUTED_EXAMPLES, len(test))), epoch=0, seed=0)
    with record_routing(model.eval()) as log:
        task.evaluate(model, task.prepare(batch, None))
    chosen = sum(int((record.ids >= 0).sum()) for record in log.values())
    return chosen / sum(record.tokens for record in log.values())
