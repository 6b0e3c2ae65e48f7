"""Results of ``serve.py`` as data and as tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from measure import MIB, figures_table
from rich.console import Console
from serve_artifacts import Variant
from serve_clients import Step
from serve_search import Budget

from intbmoe.export.artifact import MODEL, Artifact

CORES = ("fronts", "engines", "clients", "others")


@dataclass(frozen=True)
class Target:
    """The goal: a rate with these latencies."""

    rate: float
    mean_ms: float
    p99_ms: float


@dataclass
class Measured:
    """A variant and its steps, as ``serve.py`` records them."""

    variant: Variant
    artifact: Artifact
    fronts: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    highest: float | None = None
    out_of_time: bool = False
    """Whether the search ended before it reached its resolution."""
    reached_most: bool = False
    """Whether it stayed within the budget at the highest allowed rate."""
    start_s: float = 0.0
    failure: str | None = None
    """Why the measurement ended early."""

    @property
    def name(self) -> str:
        return f"{self.variant.name}, {self.fronts} front{'s' * (self.fronts > 1)}"

    def at(self, rate: float | None) -> dict[str, Any] | None:
        """Returns the last step at a rate."""
        return next((step for step in reversed(self.steps) if step["rate"] == rate), None)

    @property
    def is_a_bound(self) -> bool:
        """Whether the server may manage more than the highest good rate."""
        return self.out_of_time or self.reached_most or self.generator_is_the_limit

    @property
    def generator_is_the_limit(self) -> bool:
        """Whether the generator was late in every failed step above the highest good rate."""
        above = [step for step in self.steps if step["breach"] and step["rate"] > (self.highest or 0)]
        return bool(above) and not any(step["generator_kept_up"] for step in above)

    def to_json(self) -> dict[str, Any]:
        about = self.artifact.about
        return {
            "name": self.variant.name,
            "fronts": self.fronts,
            "method": self.artifact.method,
            "experts": None if self.variant.kind == "dense" else about["recipe"]["moe"]["experts"],
            "precomposed": about["precomposed"],
            "random_weights": not about["metrics"],
            "model_bytes": self.model_bytes,
            "version": self.artifact.version,
            "server_start_s": round(self.start_s, 2),
            "highest_rate_held": self.highest,
            "out_of_time": self.out_of_time,
            "reached_most_rate": self.reached_most,
            "failure": self.failure,
            "generator_is_the_limit": self.generator_is_the_limit,
            "steps": self.steps,
        }

    @property
    def model_bytes(self) -> int:
        return self.artifact.file(MODEL).stat().st_size


def plain(step: Step) -> dict[str, Any]:
    """Returns a step as JSON values, without NaN."""
    figures = asdict(step) | {"generator_kept_up": step.generator_kept_up}
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in figures.items()}


def print_about(console: Console, about: Mapping[str, Any], recipe: str) -> None:
    console.print(about["command"], markup=False, highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in about["machine"].items()), highlight=False)
    console.print(f"intbmoe serve … {' '.join(about['server_options'])}", markup=False, highlight=False)
    if recipe != "journeys":
        console.print("Random weights, made-up places and histories: only time is measured here.")
    console.print()


def print_steps(console: Console, measured: Measured, budget: Budget) -> None:
    """Prints all steps of a variant in order."""
    weights = "" if measured.artifact.about["metrics"] else ", random weights"
    mean = "" if budget.mean_ms is None else f", mean ≤ {budget.mean_ms:g} ms"
    title = f"{measured.name}{weights}: budget P99 ≤ {budget.p99_ms:g} ms{mean}, no errors"
    columns = ("rate", "answered/s", "mean ms", "P50", "P95", "P99", "max", "batch", "queue ms", "model ms")
    table = figures_table(title, *columns, "cores: fronts", "engines", "clients", "others", "sent late P99")
    table.add_column("budget")
    for step in measured.steps:
        latencies = (step[f"{name}_ms"] for name in ("mean", "p50", "p95", "p99", "max"))
        seen = step["server"]
        table.add_row(
            f"{step['rate']:.0f}",
            f"{step['throughput']:.0f}",
            *("–" if value is None else f"{value:.1f}" for value in latencies),
            f"{seen['batch_mean']:.1f}",
            f"{seen['queue_ms']:.1f}",
            f"{seen['compute_ms']:.1f}",
            *(f"{seen['cores'].get(role, math.nan):.2f}" for role in CORES),
            f"{step['lateness_p99_ms'] or 0:.1f}" + ("" if step["generator_kept_up"] else " late!"),
            "holds" if step["breach"] is None else step["breach"],
            style=None if step["breach"] is None else "dim",
        )
    console.print(table)
    if measured.failure is not None:
        console.print(f"failed: {measured.failure}", markup=False)
    console.print(f"highest rate held: {_highest(measured)}\n")


def _highest(measured: Measured) -> str:
    if measured.highest is None:
        return "none of those tried" if measured.steps else "none was tried: no time left"
    text = f"{measured.highest:.0f}/s"
    if measured.out_of_time:
        text += ", at least: no time left"
    if measured.reached_most:
        text += ", at least: no higher one was allowed"
    if measured.generator_is_the_limit:
        text += ", at least: beyond it the generator did not keep up"
    return text


def print_summary(console: Console, done: Sequence[Measured], common: float) -> None:
    """Prints one line per variant: its highest good rate, and its latencies at a rate common to all."""
    latencies = ("mean ms", "P50", "P99", "model ms a batch")
    columns = ("variant", "weights MiB", *latencies, "highest rate held", "its mean", "its P99")
    table = figures_table(f"All variants; latencies at {common:g} requests a second", *columns)
    for measured in done:
        first, best = measured.at(common), measured.at(measured.highest)
        cells = [f"{first[f'{name}_ms'] or math.nan:.1f}" for name in ("mean", "p50", "p99")] if first else ["–"] * 3
        cells.append(f"{first['server']['compute_ms']:.2f}" if first else "–")
        cells.append("–" if measured.highest is None else f"{'≥ ' * measured.is_a_bound}{measured.highest:.0f}")
        cells += [f"{best[f'{name}_ms']:.1f}" for name in ("mean", "p99")] if best else ["–"] * 2
        table.add_row(measured.name, f"{measured.model_bytes / MIB:.2f}", *cells)
    console.print(table)


def print_target(console: Console, done: Sequence[Measured], target: Target) -> None:
    """Prints which variants reached the goal."""
    for measured in done:
        step = measured.at(measured.highest)
        if step is None:
            continue
        met = step["throughput"] >= 0.98 * target.rate
        met = met and step["mean_ms"] <= target.mean_ms and step["p99_ms"] <= target.p99_ms
        found = f"{step['throughput']:.0f}/s, mean {step['mean_ms']:.1f} ms, P99 {step['p99_ms']:.1f} ms"
        aim = f"≥ {target.rate:g}/s, mean ≤ {target.mean_ms:g} ms, P99 ≤ {target.p99_ms:g} ms"
        console.print(f"{measured.name}: {found}; aimed at {aim}: {'reached' if met else 'not reached'}")
