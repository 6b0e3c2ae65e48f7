"""Draws the picture of docs/results/: each method's score and compute, with a panel for each study.

    python -m benchmarks.study.picture                      # docs/images/study.svg

It shows the runs in the tables of ``tables.py``, without the ablations: a line for each method, the best on top. A
study without runs has no panel. The picture is narrow enough for a phone and supports dark mode.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from benchmarks.study.attention import count_attention
from benchmarks.study.plan import RESULTS, read_summaries
from benchmarks.study.rows import Rows, find_rows
from benchmarks.study.studies import ONE_LAYER
from benchmarks.study.tables import ABLATIONS, OVERVIEW, table_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from intbmoe.compare.summary import confidence_intervals
from intbmoe.recipes.sets import PLACED
from intbmoe.registry import method_family
from intbmoe.report.canvas import Picture, save_picture, tidy
from intbmoe.report.numbers import axis_scale
from intbmoe.report.style import FAMILIES, ORANGE, PHONE_INCHES, PHONE_POINTS

OUTPUT = Path(__file__).parents[2] / "docs" / "images" / "study.svg"
TESTED = {"tiny-imagenet": (10_000, "images"), "foursquare": (1_081, "users"), "foursquare-us": (4_874, "users")}
"""Number and kind of the test examples behind an accuracy or a hit rate, which summaries do not record."""
LINE = 0.215  # height of a method's line in inches
SOFT = "#555555"
HOLLOW = {"color": SOFT, "marker": "o", "mfc": "white", "ms": 7}
MARKS = {
    "hollow: one seed": HOLLOW,
    "95 % interval over seeds": {"color": SOFT, "ls": "-", "lw": 1.5},
    "IntBMoE ± one standard\nerror of the test split": {"color": ORANGE, "lw": 9, "ls": "-", "alpha": 0.2},
    "no learning": {"color": SOFT, "lw": 1, "ls": "--"},
}
"""What the legend explains besides the families of methods."""


class Point(NamedTuple):
    title: str
    family: str
    flops: float
    mean: float
    interval: float | None
    seeds: int


class Panel(NamedTuple):
    """One study, with accuracies in per cent. ``floor`` is the best baseline that learns nothing, ``error`` is
    IntBMoE's standard error by the number of test examples (0 if the metric is not a share of them)."""

    study: str
    metric: str
    higher_is_better: bool
    points: dict[str, Point]  # the best first
    floor: tuple[str, float] | None
    error: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the study's picture from its summaries.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    panels = gather(count_attention(read_summaries(options.results)))
    if not panels:
        parser.error(f"{options.results} has no finished run of {', '.join(OVERVIEW)}")
    title = "What each method reaches, and what compute it takes"
    see, how = "The best method is on top.", "From the summaries of the study's runs."
    save_picture(Picture("study", title, see, how, draw(panels)), options.output)


def gather(summaries: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Returns a panel for each study that has runs, with the runs that its tables show."""
    rows = {study: find_rows(study, summaries)[0] for study in OVERVIEW}
    return [panel for study, found in rows.items() if found and (panel := _panel(study, found)).points]


def _panel(study: str, rows: Rows) -> Panel:
    runs = [run for found in rows.values() for run in found]
    metric, higher = runs[0]["metric"], runs[0]["higher_is_better"]
    factor, points = axis_scale(metric)[0], {}
    values = {label: [factor * run["test"][metric] for run in found] for label, found in rows.items()}
    intervals = dict(zip(values, confidence_intervals(list(values.values())), strict=True))
    for label, found in rows.items():
        if table_of(label) != ABLATIONS or label == ONE_LAYER:
            flops = fmean(run["flops_training"] for run in found)
            title = _short(found[0]["title"])
            points[label] = Point(
                title, method_family(found[0]["method"]), flops, fmean(values[label]), intervals[label], len(found)
            )
    points = dict(sorted(points.items(), key=lambda item: item[1].mean, reverse=higher))
    floors = next((run["floors"] for run in runs if run.get("floors")), {})
    reached = {name: factor * values[metric] for name, values in floors.items()}
    best = (max if higher else min)(reached.items(), key=lambda item: item[1], default=None)
    share = points["intbmoe"].mean / factor if study in TESTED and "intbmoe" in points else 0
    error = factor * (share * (1 - share) / TESTED[study][0]) ** 0.5 if share else 0
    return Panel(study, metric, higher, points, best, error)


def _short(title: str) -> str:
    return re.sub(r"^Dense (.+), width (\d+)$", r"Dense \1 \2", title).replace(
        "the class token's FFN apart", "class token apart"
    )


def draw(panels: Sequence[Panel]) -> Figure:
    """Draws the panels below each other, each as high as its methods need."""
    heights = [LINE * len(panel.points) + 0.95 for panel in panels]
    figure = Figure(figsize=(PHONE_INCHES, sum(heights) + 1.2), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)
    shown = {point.family for panel in panels for point in panel.points.values()}
    styles = {name: _marker(name) for name in FAMILIES if name in shown} | MARKS
    handles = [Line2D([], [], label=name, **{"ls": "", **style}) for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=PHONE_POINTS)
    for axes, panel in zip(
        figure.subplots(len(panels), height_ratios=heights, squeeze=False).flat, panels, strict=True
    ):
        _draw_panel(axes, panel)
    return figure


def _marker(family: str) -> dict[str, Any]:
    colour, marker = FAMILIES[family]
    return {"color": colour, "marker": marker, "ms": 13 if marker == "*" else 7}


def _draw_panel(axes: Axes, panel: Panel) -> None:
    """Draws a line for each method, with the FLOPs of a training example at its end, as a multiple of dense's."""
    low, high = _span(panel)
    own = panel.points.get("intbmoe")
    dense = panel.points.get("dense", panel.points.get(PLACED))  # on text both have the same FLOPs
    axes.set(xlim=(low, high), ylim=(len(panel.points) - 0.4, -0.6))
    tested = "{:,} test {}".format(*TESTED[panel.study]) if panel.study in TESTED else "the test split"
    measured = f"{panel.metric}{' in %' * panel.metric.startswith('accuracy')} on {tested}"
    tidy(axes, xlabel=f"{measured}, better →" if panel.higher_is_better else f"← better, {measured}", grid="x")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
    across = blended_transform_factory(axes.figure.transFigure, axes.transAxes)  # long, so from the picture's edge
    axes.text(0.01, 1.02, OVERVIEW[panel.study], transform=across, fontsize=PHONE_POINTS, fontweight="bold")
    axes.set_title("FLOPs, × dense's" if dense else " ", loc="right", fontsize=PHONE_POINTS - 1)
    if own:
        axes.axvspan(own.mean - panel.error, own.mean + panel.error, color=ORANGE, alpha=0.2, linewidth=0)
    if panel.floor and low < panel.floor[1] < high:
        axes.axvline(panel.floor[1], color=SOFT, linewidth=1, linestyle="--", zorder=1)
    for place, point in enumerate(panel.points.values()):
        style, shown = _marker(point.family), min(max(point.mean, low), high)
        if shown != point.mean:
            style["marker"] = "<" if point.mean < low else ">"
            side, away = ("left", 7) if shown == low else ("right", -7)  # points, past the marker
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            look = {"va": "center", "ha": side, "fontsize": PHONE_POINTS, "bbox": ground, "zorder": 3}
            axes.annotate(f"{point.mean:.4g}", (shown, place), (away, 0), textcoords="offset points", **look)
        elif point.interval is not None:
            ends = np.clip(shown + np.array([-1, 1]) * point.interval, low, high)
            axes.plot(ends, [place, place], color=style["color"], lw=1.5)
        axes.plot(shown, place, **style, **({"mfc": "white"} if point.seeds == 1 else {}), clip_on=False, zorder=4)
    axes.set_yticks(range(len(panel.points)), [point.title for point in panel.points.values()], fontsize=PHONE_POINTS)
    for tick, point in zip(axes.get_yticklabels(), panel.points.values(), strict=True):
        tick.set_fontweight("bold" if point is own else "normal")
    if dense:
        costs = [f"{point.flops / dense.flops:.1f}×" for point in panel.points.values()]
        beside = axes.secondary_yaxis("right")
        beside.set_yticks(range(len(costs)), costs, fontsize=PHONE_POINTS - 1)
        beside.tick_params(length=0)
        beside.spines["right"].set_visible(False)


def _span(panel: Panel) -> tuple[float, float]:
    """Returns the limits of the axis: an outlier is drawn at its edge, so that the others can be told apart."""
    first, third = np.quantile([point.mean for point in panel.points.values()], (0.25, 0.75))
    reach = 3 * (third - first) + panel.error
    near = [point for point in panel.points.values() if first - reach <= point.mean <= third + reach]
    own = panel.points.get("intbmoe")
    bars = [max(min(point.interval or 0, reach), panel.error * (point is own)) for point in near]
    ends = [point.mean + sign * bar for point, bar in zip(near, bars, strict=True) for sign in (-1, 1)]
    if panel.floor and abs(panel.floor[1] - fmean(ends)) < 2 * (max(ends) - min(ends)):
        ends.append(panel.floor[1])
    room = 0.05 * (max(ends) - min(ends)) or 0.01 * abs(ends[0])
    return min(ends) - room, max(ends) + room


if __name__ == "__main__":
    main()
