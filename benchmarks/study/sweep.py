"""Draws the sweeps of K, k, E and L: how far each value is from IntBMoE's default.

    python -m benchmarks.study.sweep                      # docs/images/study/sweep-STUDY.svg, if there are runs

The numbers are those of the sweep's table (``tables.py``): differences from the default over the seeds that both have,
with their 95 % intervals. Below each value are its FLOPs as a multiple of the default's.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.study.attention import count_attention
from benchmarks.study.claims import Rows, differences, row_spreads
from benchmarks.study.plan import RESULTS, read_summaries
from benchmarks.study.rows import find_rows
from benchmarks.study.studies import STUDIES
from benchmarks.study.tables import TITLES
from matplotlib.axes import Axes

from intbmoe.report.canvas import Picture, make_panels, save_picture, tidy
from intbmoe.report.numbers import axis_scale
from intbmoe.report.style import BLUE, GREY, ORANGE, PHONE_INCHES, PHONE_POINTS

OUTPUT = Path(__file__).parents[2] / "docs" / "images" / "study"
SWEPT = {
    "K": "K, blocks",
    "k": "k, blocks per token",
    "E": "E, experts of the pool",
    "L": "L, layers of a block",
}
DEFAULT_LAYERS = 2


class Point(NamedTuple):
    value: int
    better: float  # than the default; below zero it is worse
    interval: float  # half the 95 % interval; 0 for the default itself
    flops: float  # as a multiple of the default's


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the study's sweeps from its summaries.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    summaries = count_attention(read_summaries(options.results))
    studies = [name.removesuffix("-sweep") for name, study in STUDIES.items() if study.sets]
    for study in studies:
        rows, swept = find_rows(study, summaries)[0], find_rows(f"{study}-sweep", summaries)[0]
        if swept:
            save_picture(draw(study, gather(rows, swept), swept), options.output / f"sweep-{study}.svg")


def gather(rows: Rows, swept: Rows) -> dict[str, list[Point]]:
    """Returns the points of each panel, including the default."""
    default = rows["intbmoe"]
    metric, higher = default[0]["metric"], default[0]["higher_is_better"]
    factor = axis_scale(metric)[0] * (1 if higher else -1)
    everything = {**rows, **swept}
    found, _ = differences({"intbmoe": default, **swept}, ["intbmoe"], metric, row_spreads(everything, metric))
    usual = _flops(default)
    panels = {name: [Point(value, 0.0, 0.0, 1.0)] for name, value in _defaults(default[0]).items()}
    for label, runs in swept.items():
        name, value = re.fullmatch(r".*, (\w) = (\d+)", runs[0]["title"]).groups()
        one = found[label, "intbmoe"]
        panels[name].append(Point(int(value), factor * one.value, abs(factor) * one.interval_95, _flops(runs) / usual))
    return {name: sorted(points) for name, points in panels.items()}


def _flops(runs: Sequence[Mapping[str, Any]]) -> float:
    return fmean(run["flops_training"] for run in runs)


def _defaults(summary: Mapping[str, Any]) -> dict[str, int]:
    moe = summary["recipe"]["moe"]
    options = moe["options"]
    return {"K": options["blocks"], "k": options["top_k"], "E": moe["experts"], "L": DEFAULT_LAYERS}


def draw(study: str, panels: Mapping[str, Sequence[Point]], swept: Rows) -> Picture:
    one = next(iter(swept.values()))[0]
    unit = "points" if one["metric"].startswith("accuracy") else "nats"
    figure, grid = make_panels(len(panels), PHONE_INCHES / 2, 2.7, f"better by, {unit}")
    for axes, (name, points) in zip(grid, panels.items(), strict=True):
        _draw_panel(axes, SWEPT[name], points)
    title = f"{TITLES[study]}: K, k, E and L varied one at a time"
    see = "The star is the default. Above the line is better; a bar that crosses it may be chance."
    how = f"Test {one['metric']} of one seed against the default's, with 95 % intervals; below: FLOPs as a multiple."
    return Picture(f"sweep-{study}", title, see, how, figure)


def _draw_panel(axes: Axes, title: str, points: Sequence[Point]) -> None:
    """Draws the values at equal distances, because each is about twice the one before."""
    axes.axhline(0, color=GREY, linewidth=1)
    for place, point in enumerate(points):
        if point.interval:
            axes.errorbar(place, point.better, point.interval, color=BLUE, marker="o", ms=6, lw=1.5)
        else:
            axes.plot(place, 0, color=ORANGE, marker="*", ms=15, zorder=4)
    tidy(axes, title, grid="y")
    labels = [f"{point.value}\n{point.flops:.1f}×" for point in points]
    axes.set_xticks(range(len(points)), labels, fontsize=PHONE_POINTS - 2)
    axes.set_xlim(-0.5, len(points) - 0.5)


if __name__ == "__main__":
    main()
