"""What came of the runs: how good each variant is, and what it costs."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.special import stdtrit
from torch import nn

from intbmoe.compare.plan import Job
from intbmoe.counting import Counts, Shares, count, shares_of
from intbmoe.models.vit import ViT, class_token_ffns
from intbmoe.precomposition import has_one_precomposed_form, precompose
from intbmoe.registry import find_method
from intbmoe.routing import record_routing
from intbmoe.tasks import Task, make_task
from intbmoe.train import load

ROUTED_EXAMPLES = 64
"""Test examples on which the experts of a token are counted, where a trained router decides on their number."""


@dataclass(frozen=True)
class Summary:
    title: str
    label: str
    method: str
    seeds: tuple[int, ...]
    metric: str
    values: tuple[float, ...]
    """The deciding metric on the test split, one value per seed; empty for a precomposed form, which is not trained."""
    results: tuple[dict[str, Any], ...]
    counts: Counts
    active: float | None  # experts a token had on average, where the trained router decides
    shares: Shares
    reported: Mapping[str, str]
    """Further metrics of the tables, with their headings (``Task.reported``)."""

    def record(self) -> dict[str, Any]:
        """As plain data with all digits: what tables, pictures and the page are made from."""
        tests = [result["test"] for result in self.results]
        names = [name for name in (tests[0] if tests else {}) if all(name in test for test in tests)]
        return {
            "title": self.title,
            "label": self.label,
            "method": self.method,
            "seeds": list(self.seeds),
            "metric": self.metric,
            "values": list(self.values),
            "mean": statistics.fmean(self.values) if self.values else None,
            "interval_95": confidence_interval(self.values),
            **self.counts._asdict(),
            **self.shares._asdict(),
            "active_experts": self.active,
            "seconds": statistics.fmean(result["seconds"] for result in self.results) if self.results else None,
            "results": list(self.results),
            "metrics": {name: _mean_and_interval([test[name] for test in tests]) for name in names},
            "reported": dict(self.reported),
            "validated": all(result.get("valid") for result in self.results),
            "report": "best" if any(result.get("report") == "best" for result in self.results) else "last",
        }


def _mean_and_interval(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": sum(values) / len(values), "interval_95": confidence_interval(values)}


def confidence_interval(values: Sequence[float]) -> float | None:
    """Half the width of Student's 95 % interval for the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    quantile = float(stdtrit(len(values) - 1, 0.975))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def summarise(jobs: Iterable[Job]) -> list[Summary]:
    """The finished jobs, one row per variant, and one for the precomposed form of a plain method that has one."""
    by_label: dict[str, list[Job]] = {}
    for job in jobs:
        if job.run.finished:
            by_label.setdefault(job.variant.label, []).append(job)
    summaries = []
    for label, members in by_label.items():
        first = members[0]
        task, method = make_task(first.recipe), find_method(first.variant.moe.name)
        results = tuple(job.run.result for job in members)
        model = load(first.run).cpu()
        active = active_experts(task, model) if method.dynamic else None
        summary = Summary(
            title=first.variant.title,
            label=label,
            method=method.name,
            seeds=tuple(job.seed for job in members),
            metric=task.metric,
            values=tuple(result["test"][task.metric] for result in results),
            results=results,
            counts=_count(task, _untrained(task) if active else model, active),
            active=active,
            shares=shares_of(model, task.example_inputs(), active),
            reported=task.reported,
        )
        summaries.append(summary)
        if method.composes and first.variant.moe.label is None and has_one_precomposed_form(model):
            counts = _count(task, precompose(model), None)
            summaries.append(
                replace(summary, title=f"{summary.title}, precomposed", values=(), results=(), counts=counts)
            )
    return summaries


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
    """Experts that a valid token of the test split has on average, over all layers; padding has none to count."""
    test = task.split("test")
    batch = test.batch(range(min(ROUTED_EXAMPLES, len(test))), epoch=0, seed=0)
    with record_routing(model.eval()) as log:
        task.evaluate(model, task.prepare(batch, None))
    chosen = sum(int((record.ids >= 0).sum()) for record in log.values())
    return chosen / sum(record.tokens for record in log.values())
