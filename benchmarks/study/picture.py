"""The picture of docs/results.md: what each method reaches and what compute it takes, a panel a study.

    python -m benchmarks.study.picture                      # docs/images/study.png

It shows the runs that the tables of ``tables.py`` show, without the ablations. A study without runs has no panel.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from benchmarks.study.plan import RESULTS, read_summaries
from benchmarks.study.studies import ONE_LAYER, REAL
from benchmarks.study.tables import ABLATIONS, COMPUTE, CONTROL, NARROW, PARAMETERS, TITLES, Rows, find_rows, table_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, LogLocator

from intbmoe.compare.summary import confidence_intervals
from intbmoe.recipes.sets import PLACED
from intbmoe.report.canvas import tidy
from intbmoe.report.numbers import axis_scale
from intbmoe.report.style import BLUE, GRID, ORANGE

OUTPUT = Path(__file__).parents[2] / "docs" / "images" / "study.png"
TESTED = {"tiny-imagenet": (10_000, "images"), "foursquare": (1_081, "users"), "foursquare-us": (4_874, "users")}
"""What an accuracy or a hit rate on the test split is a share of: summaries do not say it."""
OWN = "IntBMoE"
INK, DPI = "#444444", 150
FAR = DPI / 72 * np.array([8, 15, 24, 36, 50, 66])  # from a point to its label, in pixels
CONTROLS = "Equal compute; dense in the mixture's place"
FAMILIES = {PARAMETERS: PARAMETERS, COMPUTE: CONTROLS, NARROW: CONTROLS, CONTROL: CONTROLS, ABLATIONS: None}
"""How points of a table are drawn; the other ablations are not."""
STYLES = {
    OWN: {"color": ORANGE, "marker": "*", "ms": 14},
    CONTROLS: {"color": BLUE, "marker": "s", "ms": 6},
    PARAMETERS: {"color": INK, "marker": "o", "ms": 6},
    "hollow: one seed; else mean, 95 % interval": {"color": INK, "marker": "o", "mfc": "white"},
    "Dense FFNs made wider there": {"color": BLUE, "lw": 1, "ls": "-"},
    "IntBMoE's compute": {"color": ORANGE, "lw": 1, "ls": ":"},
    "IntBMoE ± one standard error of the test split": {"color": ORANGE, "lw": 8, "ls": "-", "alpha": 0.15},
}


class Point(NamedTuple):
    title: str
    family: str
    flops: float
    mean: float
    interval: float | None


class Panel(NamedTuple):
    """One study, accuracies in per cent; ``floor`` is the best of what needs no learning, ``error`` IntBMoE's standard
    error by the number of test examples (0 where the metric is no share of them)."""

    study: str
    metric: str
    higher_is_better: bool
    points: dict[str, Point]
    floor: tuple[str, float] | None
    error: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the study's picture from its summaries.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    panels = gather(read_summaries(options.results))
    if not panels:
        parser.error(f"{options.results} holds no finished run of {', '.join(REAL)}")
    draw(panels).savefig(options.output, dpi=DPI)


def gather(summaries: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """A panel for each study that has runs, with the runs of the settings that its tables show."""
    rows = {study: find_rows(study, summaries)[0] for study in REAL}
    return [panel for study, found in rows.items() if found and (panel := _panel(study, found)).points]


def _panel(study: str, rows: Rows) -> Panel:
    runs = [run for found in rows.values() for run in found]
    metric, higher = runs[0]["metric"], runs[0]["higher_is_better"]
    factor, points = axis_scale(metric)[0], {}
    for label, found in rows.items():
        family = OWN if label in ("intbmoe", ONE_LAYER) else FAMILIES[table_of(label)]
        if family is None:
            continue
        values = [factor * run["test"][metric] for run in found]
        flops = fmean(run["flops_training"] for run in found)
        points[label] = Point(_short(found[0]["title"]), family, flops, fmean(values), confidence_intervals([values])[0])
    floors = next((run["floors"] for run in runs if run.get("floors")), {})
    reached = {name: factor * values[metric] for name, values in floors.items()}
    best = (max if higher else min)(reached.items(), key=lambda item: item[1], default=None)
    share = points["intbmoe"].mean / factor if study in TESTED and "intbmoe" in points else 0
    error = factor * (share * (1 - share) / TESTED[study][0]) ** 0.5 if share else 0
    return Panel(study, metric, higher, points, best, error)


def _short(title: str) -> str:
    """There is little room: a width and a colour say that a network is dense."""
    return re.sub(r"^Dense (.+), width (\d+)$", r"\1 \2", title).replace("the mixture's", "its")


def draw(panels: Sequence[Panel]) -> Figure:
    """Two panels a row; of an odd number the first has a row of its own."""
    odd, rows = len(panels) % 2, (len(panels) + 1) // 2
    figure = Figure(figsize=(11, 4.1 * rows + 0.8), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)
    handles = [Line2D([], [], label=name, **{"ls": "", **style}) for name, style in STYLES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes = figure.subplot_mosaic(np.reshape([0] * odd + [*range(len(panels))], (rows, 2)))
    drawn = [_draw_panel(axes[place], panel) for place, panel in enumerate(panels)]
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # labels are placed in pixels: nothing may move any more
    for labels in drawn:
        _place(labels[0].axes, labels)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> list[Text]:
    """A panel; returns its labels, which are not at their places yet."""
    flops = [point.flops for point in panel.points.values()]
    (low, high), reach = _span(panel), 1.1 * max(flops) / min(flops)
    axes.set(xscale="log", xlim=(min(flops) / reach**0.12, max(flops) * reach**0.3), ylim=(low, high))
    axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=EngFormatter())
    axes.minorticks_off()
    axes.set_xlabel("FLOPs of an example in a training batch, log scale", fontsize=9)
    tested = "{:,} test {}".format(*TESTED[panel.study]) if panel.study in TESTED else "test split"
    better, percent = "higher" if panel.higher_is_better else "lower", panel.metric.startswith("accuracy")
    axes.set_ylabel(f"{panel.metric}{' (%)' * percent}, {tested}; {better} is better", fontsize=9)
    tidy(axes)
    axes.grid(color=GRID, linewidth=0.5)
    own, dense, placed, swiglu = map(panel.points.get, ("intbmoe", "dense", PLACED, "swiglu-wide"))
    others = {"dense": dense, "in its place": placed, "wide SwiGLU": swiglu}
    digits = 2 if percent else 3 if panel.metric == "loss" else 4
    leads = [f"{name} {own.mean - it.mean:+.{digits}f}" for name, it in others.items() if own and it]
    against = f"IntBMoE against {', '.join(leads)}".replace("-", "−") if leads else ""
    axes.set_title(f"{TITLES[panel.study]}\n{against}", loc="left", fontsize=9)
    if own:
        axes.axvline(own.flops, color=ORANGE, linewidth=1, linestyle=":", zorder=1)
        axes.axhspan(own.mean - panel.error, own.mean + panel.error, color=ORANGE, alpha=0.15, linewidth=0)
    if panel.floor and low < panel.floor[1] < high:
        axes.axhline(panel.floor[1], color=INK, linewidth=1, linestyle="--", zorder=1)
        told = f"no learning: {panel.floor[0]} {panel.floor[1]:.4g}"
        axes.text(0.01, panel.floor[1], told, transform=axes.get_yaxis_transform(), va="bottom", fontsize=8)
    base = placed or dense
    for kind in ("dense", "swiglu"):
        wider = [point for width in ("narrow", "wide") if (point := panel.points.get(f"{kind}-{width}"))]
        if base and wider:
            line = [(point.flops, point.mean) for point in (base, *wider)]
            axes.plot(*zip(*line, strict=True), color=BLUE, linewidth=1, zorder=2)
    labels = []
    for point in panel.points.values():
        style, text, height = dict(STYLES[point.family]), point.title, min(max(point.mean, low), high)
        if height != point.mean:
            style["marker"], text = "v" if point.mean < low else "^", f"{text}, at {point.mean:.4g}"
        filled = {"mfc": "white", "zorder": 4} if point.interval is None else {"zorder": 5}
        filled["zorder"] += 2 * (point is own)
        ends = height + np.array([-1, 1]) * (point.interval or 0)
        axes.plot([point.flops] * 2, ends, color=style["color"], lw=1.2, marker="_")
        axes.plot(point.flops, height, **style, **filled, clip_on=False)
        weight = "bold" if point is own else "normal"
        labels.append(axes.text(point.flops, height, text, color=style["color"], fontsize=9, fontweight=weight))
    return labels


def _span(panel: Panel) -> tuple[float, float]:
    """Of the vertical axis: a method far from all others stands at its edge, so that the others can be told apart."""
    first, third = np.quantile([point.mean for point in panel.points.values()], (0.25, 0.75))
    reach = 3 * (third - first) + panel.error
    near = [point for point in panel.points.values() if first - reach <= point.mean <= third + reach]
    own = panel.points.get("intbmoe")
    bars = [max(min(point.interval or 0, reach), panel.error * (point is own)) for point in near]
    ends = [point.mean + sign * bar for point, bar in zip(near, bars, strict=True) for sign in (-1, 1)]
    if panel.floor and abs(panel.floor[1] - fmean(ends)) < 2 * (max(ends) - min(ends)):
        ends.append(panel.floor[1])
    room = 0.1 * (max(ends) - min(ends)) or 0.01 * abs(ends[0])
    return min(ends) - room, max(ends) + room


def _place(axes: Axes, labels: Sequence[Text]) -> None:
    """Move each label to where it hides least around its point, again and again as the others move too."""
    paths = [line.get_transform().transform_path(line.get_path()).interpolated(30).vertices for line in axes.lines]
    lines, anchors = np.concatenate(paths), axes.transData.transform([label.get_position() for label in labels])
    angle, far = (part.reshape(-1, 1) for part in np.meshgrid(np.linspace(0, 2 * np.pi, 24, endpoint=False), FAR))
    ways = np.hstack([np.cos(angle), np.sin(angle)])
    low, high = axes.get_window_extent().get_points()
    taken: dict[int, np.ndarray] = {}
    for place in [*range(len(labels))] * 6:
        size, anchor = labels[place].get_window_extent().size, anchors[place]
        boxes = np.stack([corner := anchor + ways * far - size * (1 - ways) / 2, corner + size], axis=1)
        leaders = np.linspace(np.broadcast_to(anchor, corner.shape), np.clip(anchor, *boxes.swapaxes(0, 1)), 8, axis=1)
        others = np.concatenate([np.delete(anchors, place, 0), *(taken[other] for other in taken if other != place)])
        cost = far[:, 0] / 5 + 1e4 * ((boxes[:, 0] < low) | (boxes[:, 1] > high)).any(1)
        for points, margin, weight in ((lines, 3, 5), (anchors, 13, 50), (others, 4, 30)):
            cost += weight * ((points > boxes[:, :1] - margin) & (points < boxes[:, 1:] + margin)).all(2).sum(1)
        x, y = (np.abs(leaders[:, :, None, axis] - others[:, axis]) < 9 for axis in (0, 1))
        cost += 40 * (x & y).any(2).sum(1)
        best = cost.argmin()
        grid = np.meshgrid(*(np.linspace(*ends) for ends in zip(*boxes[best], (16, 3), strict=True)))
        taken[place] = np.concatenate([np.stack(grid, axis=-1).reshape(-1, 2), leaders[best]])
    for label, points in zip(labels, taken.values(), strict=True):
        label.set(position=points[0], transform=None, va="bottom")
        if np.hypot(*(points[-8] - points[-1])) > FAR[0] + 1:
            axes.plot(*points[-8:].T, color=label.get_color(), linewidth=0.6, transform=None, zorder=3)


if __name__ == "__main__":
    main()
