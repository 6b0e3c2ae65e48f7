"""Pictures of a comparison, each drawn from its records alone: the one beside the table, and those on the page."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from intbmoe.compare.summary import trained_rows
from intbmoe.registry import method_family
from intbmoe.report.canvas import LOAD_TITLES, Data, Picture, add_legend, shorten, tidy
from intbmoe.report.numbers import axis_scale, flops_unit, format_difference
from intbmoe.report.style import BLUE, FAMILIES, GREY, GRID, METHODS, PALE, PHONE_INCHES, PHONE_POINTS
from intbmoe.report.style import ORANGE as OWN

OTHERS = {"color": PALE, "linewidth": 1.0, "zorder": 2}
AROUND = (
    *((9, 0, "left"), (-9, 0, "right"), (0, 11, "center"), (0, -11, "center")),
    *((8, 10, "left"), (8, -10, "left"), (-8, 10, "right"), (-8, -10, "right")),
    *((9, 20, "left"), (9, -20, "left"), (-9, 20, "right"), (-9, -20, "right")),
)
"""Where a point's name may go, the best place first: points to the right and up, and the side of the name at it."""
LONGEST_NAME = 22  # letters of a method's title beside its row
ALIKE = 1.05  # costs are called equal if the largest over the smallest is at most this
MOST_COLOURED, MOST_NAMED = 7, 5  # lines that an eye can follow; with more methods, the others are grey
GRID_TITLES = {"K": "blocks K", "k": "blocks per token k", "E": "expert bases E", "L": "layers per block L"}


def draw_comparison(data: Data, curves: Sequence[Data]) -> list[Picture]:
    return [*_draw_cost(data), *_draw_curves(data, curves), *_draw_load(data, curves), *_draw_sensitivity(data)]


def _add_legend(figure: Figure, rows: Sequence[Data]) -> None:
    add_legend(figure, {method_family(row["method"]) for row in rows})


# The table as a picture: how good, and at what cost, one line per variant, the best on top.


def draw_table(rows: Sequence[Data], title: str, higher_is_better: bool) -> Picture:
    """Draw the metric with its interval on the left, FLOPs and parameters on the right."""
    trained = sorted(trained_rows(rows), key=lambda row: row["mean"] if higher_is_better else -row["mean"])
    figure = Figure(figsize=(PHONE_INCHES, 1.6 + 0.38 * len(trained)), layout="constrained")
    metric, flops, params = figure.subplots(1, 3, sharey=True, width_ratios=(1.9, 1, 1))
    factor, percent = axis_scale(trained[0]["metric"])
    metric.set_xlim(*_draw_dots(metric, trained, factor))
    metric.set_title(f"{trained[0]['metric']}{percent}", loc="left", fontsize=PHONE_POINTS)
    unit, letter = flops_unit(row["flops"] for row in trained)
    _draw_bars(flops, trained, "flops", unit, f"FLOPs of an\nexample ({letter})")
    _draw_precomposed(flops, trained, rows, unit)
    _draw_bars(params, trained, "params", 1e6, "parameters\n(M)")
    names = [shorten(row["title"], LONGEST_NAME) for row in trained]
    metric.set_yticks(range(len(trained)), names, fontsize=PHONE_POINTS)
    for label, row in zip(metric.get_yticklabels(), trained, strict=True):
        label.set_fontweight("bold" if row["label"] == "intbmoe" else "normal")
    metric.set_ylim(-0.6, len(trained) - 0.4)
    add_legend(figure, {method_family(row["method"]) for row in trained}, PHONE_POINTS - 1)
    figure.suptitle(title, fontsize=PHONE_POINTS + 1, x=0.01, ha="left")
    see = "How good each method is and what it costs, the best on top."
    how = "Means over the seeds with 95 % intervals; FLOPs are for one example by itself."
    return Picture("table", title, see, how, figure)


def _draw_dots(axes: Axes, rows: Sequence[Data], factor: float) -> tuple[float, float]:
    """Draw dots, not bars, because the axis does not begin at zero; return its ends."""
    low = min((row["mean"] - (row["interval_95"] or 0)) * factor for row in rows)
    high = max((row["mean"] + (row["interval_95"] or 0)) * factor for row in rows)
    reach = high - low or 0.1 * abs(high) or 1
    start = low - 0.08 * reach
    for place, row in enumerate(rows):
        colour, marker = FAMILIES[method_family(row["method"])]
        mean, interval = row["mean"] * factor, (row["interval_95"] or 0) * factor
        axes.plot([start, mean], [place, place], color=GRID, linewidth=1, zorder=1)
        if interval:
            axes.plot([mean - interval, mean + interval], [place, place], color=colour, linewidth=2, alpha=0.6)
        axes.plot(mean, place, color=colour, marker=marker, markersize=12 if marker == "*" else 7, zorder=3)
        text = f"{mean:.2f}" if factor == 100 else f"{mean:.4f}"
        look = {"textcoords": "offset points", "va": "center", "fontsize": PHONE_POINTS - 1}
        axes.annotate(text, (mean + interval, place), (7, 0), **look)
    _tidy_rows(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    return start, high + 0.4 * reach  # room for the last number


def _draw_bars(axes: Axes, rows: Sequence[Data], column: str, unit: float, title: str) -> None:
    values = [row[column] / unit for row in rows]
    bars = axes.barh(
        range(len(rows)),
        values,
        height=0.6,
        color=[FAMILIES[method_family(row["method"])][0] for row in rows],
        alpha=0.85,
    )
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=PHONE_POINTS - 1)
    axes.set_xlim(0, max(values) * 1.6)  # room for the longest bar's number
    axes.set_title(title, loc="left", fontsize=PHONE_POINTS)
    axes.set_xticks([])
    _tidy_rows(axes)


def _draw_precomposed(axes: Axes, trained: Sequence[Data], rows: Sequence[Data], unit: float) -> None:
    """Mark the part of IntBMoE's FLOPs that remains when its blocks are composed beforehand."""
    for row in rows:
        if row["mean"] is None:
            place = next(place for place, other in enumerate(trained) if other["label"] == row["label"])
            value = row["flops"] / unit
            axes.barh(place, value, height=0.6, color="none", edgecolor="white", hatch="////", linewidth=0)
            look = {"textcoords": "offset points", "va": "top", "fontsize": PHONE_POINTS - 3}
            axes.annotate(f"{value:.3g} precomposed", (0, place - 0.3), (1, -1), **look)


def _tidy_rows(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)


# The metric against what it costs.


def _draw_cost(data: Data) -> list[Picture]:
    rows = trained_rows(data["rows"])
    if len(rows) < 2:
        return []
    factor, unit = axis_scale(data["metric"])
    flops, letter = flops_unit(row["flops"] for row in rows)
    axes_of = (
        ("params", 1e6, "parameters (M)"),
        ("flops", flops, f"FLOPs of one example ({letter})"),
        ("seconds", 1, "training, seconds per run"),
    )
    equal = [axis for axis in axes_of if _alike(rows, axis[0])]  # points on top of each other say nothing
    axes_of = tuple(axis for axis in axes_of if axis not in equal) or axes_of[1:2]
    figure = Figure(figsize=(max(5.5, 3.7 * len(axes_of)), 4.6), layout="constrained")
    panels = figure.subplots(1, len(axes_of), sharey=True, squeeze=False)[0]
    for axes, (column, scale, title) in zip(panels, axes_of, strict=True):
        values = [row[column] / scale for row in rows]
        if min(values) > 0 and max(values) > 3 * min(values):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("{x:g}" if max(values) < 10 * min(values) else "")
        for row, value in zip(rows, values, strict=True):
            _point(axes, row, value, factor)
        axes.margins(0.16, 0.1)
        axes.set_xlabel(title, fontsize=10)
        tidy(axes, grid="both", size=8.5)
    panels[0].set_ylabel(f"{data['metric']}{unit}", fontsize=10)
    _add_legend(figure, rows)
    figure.get_layout_engine().execute(figure)  # labels need to know where the points are
    first = sorted(rows, key=lambda row: row["label"] != row["method"])  # methods get names before their variants
    for axes, (column, scale, _) in zip(panels, axes_of, strict=True):
        places = [(row[column] / scale, row["mean"] * factor) for row in first]
        _label(axes, places, [row["title"] for row in first])
    corner = "upper" if data["higher_is_better"] else "lower"
    see = f"The best place is the {corner} left corner: good and cheap. {_undominated(data, rows)}"
    see += "".join(_told_equal(rows, *axis) for axis in equal if axis not in axes_of)
    how = (
        "Each point is the mean over its seeds, the bar its 95 % interval. Parameters and FLOPs are counted on the "
        "trained model, FLOPs for one example by itself; seconds are the measured time of a training run, and runs "
        "trained side by side share their machine. Horizontal axes are logarithmic where values differ a lot."
    )
    return [Picture("cost", "What quality costs", see, how, figure)]


def _alike(rows: Sequence[Data], column: str) -> bool:
    values = [row[column] for row in rows]
    return max(values) <= ALIKE * min(values)


def _told_equal(rows: Sequence[Data], column: str, scale: float, title: str) -> str:
    low, high = (end(row[column] for row in rows) / scale for end in (min, max))
    span = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
    return f" Not drawn, because it is about the same for all: {title}, {span}."


def _point(axes: Axes, row: Data, value: float, factor: float) -> None:
    colour, marker = FAMILIES[method_family(row["method"])]
    reach = (row["interval_95"] or 0) * factor
    if reach:
        axes.errorbar(value, row["mean"] * factor, yerr=reach, color=colour, linewidth=1.5, alpha=0.55, zorder=2)
    size = 14 if marker == "*" else 7
    axes.plot(value, row["mean"] * factor, color=colour, marker=marker, markersize=size, zorder=3)


def _undominated(data: Data, rows: Sequence[Data]) -> str:
    sign = 1 if data["higher_is_better"] else -1
    best: list[Data] = []
    for row in sorted(rows, key=lambda row: (row["flops"], -sign * row["mean"])):
        if not best or sign * row["mean"] > sign * best[-1]["mean"]:
            best.append(row)
    return f"By FLOPs, nothing cheaper has a better mean than: {', '.join(row['title'] for row in best)}."


def _label(axes: Axes, places: Sequence[tuple[float, float]], texts: Sequence[str]) -> None:
    """Put names beside points where they cover neither other names nor points; omit a name that fits nowhere."""
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    frame = axes.get_window_extent(renderer)
    points = [axes.transData.transform(place) for place in places]
    taken: list[Any] = []
    for place, text in zip(places, texts, strict=True):
        for x, y, side in AROUND:
            look = {"ha": side, "va": "center", "fontsize": 8, "textcoords": "offset points"}
            label = axes.annotate(text, place, (x, y), **look)
            box = label.get_window_extent(renderer).padded(1)
            inside = box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1
            covers = any(box.overlaps(other) for other in taken) or any(box.contains(*point) for point in points)
            if inside and not covers:
                taken.append(box)
                break
            label.remove()


# Over training.


OVER_TRAINING = {
    "curves": (
        "Loss of all runs over training",
        "One line for each run; the seeds of a method share its colour, so their spread shows the effect of chance. "
        "Where the validation loss rises while the training loss falls, a model overfits.",
        "From each run's metrics.jsonl, at most 400 points of a curve. Training values are means since the previous "
        "line, without auxiliary losses; validation covers the whole split.",
    ),
    "load": (
        "Load over training",
        "How evenly each method spread its tokens while it was trained. Lines at 1 are even; a low utilisation means "
        "experts without tokens, and a high largest load means that one of them does the work of many.",
        "From each run's metrics.jsonl: loads since the previous line, means over the layers with a router. Methods "
        "without a choice of experts have no load and no line.",
    ),
}
"""Title, what to see, and how it was made."""


def _draw_curves(data: Data, curves: Sequence[Data]) -> list[Picture]:
    metric = data["metric"]
    wanted = [("train", "loss", "training loss"), ("valid", "loss", "validation loss")]
    if metric != "loss":
        wanted.append(("valid", metric, f"validation {metric}"))
    return _draw_over_training(data, curves, "curves", wanted)


def _draw_load(data: Data, curves: Sequence[Data]) -> list[Picture]:
    dropping = any(c["name"] == "dropped" and any(c["values"]) for c in curves)
    wanted = [("train", name, title) for name, title in LOAD_TITLES.items() if name != "dropped" or dropping]
    return _draw_over_training(data, curves, "load", wanted)


def _draw_over_training(
    data: Data, curves: Sequence[Data], name: str, wanted: Sequence[tuple[str, str, str]]
) -> list[Picture]:
    """Draw a panel for each of the curves (split, name, title) that exist; return nothing if none does."""
    kinds = {(curve["split"], curve["name"]) for curve in curves}
    wanted = [(split, kind, words) for split, kind, words in wanted if (split, kind) in kinds]
    if not wanted:
        return []
    title, see, how = OVER_TRAINING[name]
    shown = {(split, kind) for split, kind, _ in wanted}
    titles = {curve["label"]: curve["title"] for curve in curves if (curve["split"], curve["name"]) in shown}
    styles = _styles(data, list(dict.fromkeys(curve["label"] for curve in curves)))  # the same in all pictures
    named = {label: words for label, words in titles.items() if label in styles}
    figure = Figure(figsize=(11, 3.3 + 0.22 * -(-len(named) // 5)), layout="constrained")
    panels = figure.subplots(1, len(wanted), squeeze=False)[0]
    for axes, (split, kind, words) in zip(panels, wanted, strict=True):
        for curve in curves:
            if (curve["split"], curve["name"]) == (split, kind):
                style = styles.get(curve["label"], OTHERS)
                single = {"marker": "o", "markersize": 5} if len(curve["steps"]) == 1 else {}
                axes.plot(curve["steps"], curve["values"], **style, **single)
        axes.set_title(words, loc="left", fontsize=10)
        axes.set_xlim(0, 1.03 * max(step for curve in curves for step in curve["steps"]))
        tidy(axes, xlabel="step", ticks=5, grid="y", size=8.5)
    handles = [Line2D([], [], label=words, **styles[label]) for label, words in named.items()]
    others = [words for label, words in titles.items() if label not in styles]
    if others:
        handles.append(Line2D([], [], label=f"{len(others)} others", **OTHERS))
        see += f" In colour: IntBMoE, dense and the best of the others by the table above. Grey: {', '.join(others)}."
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9, handlelength=2.6)
    return [Picture(name, title, see, how, figure)]


def _styles(data: Data, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return how the lines of each method look; if there are too many to follow, only some methods have colours."""
    means = {row["label"]: row["mean"] for row in trained_rows(data["rows"])}
    sign = -1 if data["higher_is_better"] else 1
    first = [label for label in ("intbmoe", "dense") if label in labels]
    others = sorted((one for one in labels if one in means and one not in first), key=lambda one: sign * means[one])
    few = {*first, *others[: MOST_NAMED - len(first)]}
    kept = [label for label in labels if label in few or len(labels) <= MOST_COLOURED]
    colours = iter(METHODS)
    own, other = {"color": OWN, "linewidth": 2.2, "zorder": 4}, {"linewidth": 1.5, "zorder": 3}
    return {label: own if label == "intbmoe" else {"color": next(colours), **other} for label in kept}


# IntBMoE's four numbers.


def _draw_sensitivity(data: Data) -> list[Picture]:
    rows = {row["label"]: row for row in trained_rows(data["rows"])}
    grids = {
        name: [(float(one["value"]), rows[one["label"]]) for one in variants if one["label"] in rows]
        for name, variants in data["sets"].items()
        if name in GRID_TITLES
    }
    grids = {name: points for name, points in grids.items() if len(points) > 1}
    if not grids:
        return []
    factor, unit = axis_scale(data["metric"])
    figure = Figure(figsize=(max(5.0, 2.9 * len(grids)), 3.3), layout="constrained")
    panels = figure.subplots(1, len(grids), sharey=True, squeeze=False)[0]
    for axes, (name, points) in zip(panels, grids.items(), strict=True):
        places = range(len(points))
        means = [row["mean"] * factor for _, row in points]
        axes.plot(places, means, color=BLUE, marker="o", markersize=5, linewidth=1.5, zorder=2)
        for place, (_, row) in zip(places, points, strict=True):
            if row["interval_95"]:
                reach = row["interval_95"] * factor
                axes.errorbar(place, row["mean"] * factor, yerr=reach, color=BLUE, linewidth=1.2, alpha=0.5)
            if row["label"] == "intbmoe":
                axes.axhline(row["mean"] * factor, color=GREY, linewidth=1, zorder=1)
                axes.plot(place, row["mean"] * factor, color=OWN, marker="*", markersize=14, zorder=3)
        axes.set_xticks(list(places), [f"{value:g}" for value, _ in points])
        axes.set_xlabel(GRID_TITLES[name], fontsize=10)
        axes.margins(0.1, 0.12)
        tidy(axes, grid="y", size=8.5)
    panels[0].set_ylabel(f"{data['metric']}{unit}", fontsize=10)
    see = " ".join(_told_grid(data, name, points) for name, points in grids.items())
    how = (
        "One of K, k, E and L is changed at a time; an orange star and the grey line mark the recipe's own value. "
        "Means over the seeds, bars are 95 % intervals; all panels share the vertical axis. K = 1 has k = 1, and "
        "blocks of another depth have the same number of weights."
    )
    return [Picture("sensitivity", "Sensitivity to K, k, E and L", see, how, figure)]


def _told_grid(data: Data, name: str, points: Sequence[tuple[float, Data]]) -> str:
    best = (max if data["higher_is_better"] else min)(points, key=lambda point: point[1]["mean"])
    means = [row["mean"] for _, row in points]
    span = format_difference(data["metric"], max(means) - min(means), "points")
    return f"{name}: best at {best[0]:g}, all within {span}."
