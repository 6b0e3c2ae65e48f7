"""Pictures of an analysis, each drawn from its saved data alone.

A drawing function takes the content of one ``data/*.json`` and gives pictures, each with a caption: a title, what to
see, and how it was computed. The same data gives the same bytes.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, told apart also by those who see fewer.
BLUE, ORANGE, GREY, GRID = "#0072b2", "#d55e00", "#777777", "#dddddd"
DIVERGING = "RdBu_r"
FORMATS = ("png", "svg")
MOST_ROWS = 30
"""Labels that one heat map shows; of more, those farthest from uniform. The data has all."""
FRACTIONS = ("accuracy", "HR@", "NDCG@")
"""Beginnings of metrics that are shares, and whose differences are told in percentage points."""
LOAD_TITLES = {
    "utilisation": "utilisation (1: all get tokens)",
    "entropy": "entropy of the load (1: even)",
    "worst_case": "largest load / mean load (1: even)",
    "dropped": "share of assignments dropped",
}


@dataclass(frozen=True)
class Picture:
    """A figure and what is to be said under it."""

    name: str
    """Of its files, without ending."""
    title: str
    see: str
    """What to see."""
    how: str
    """How it was computed."""
    figure: Figure

    def caption(self) -> dict[str, str]:
        """The words, as data."""
        return {"title": self.title, "see": self.see, "how": self.how}

    def content(self, form: str) -> bytes:
        """The bytes of a PNG or SVG, the same for the same figure."""
        buffer = io.BytesIO()
        # Without a salt and with a date, no two SVG files would be equal.
        metadata = {"Date": None} if form == "svg" else {}
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(buffer, format=form, dpi=150, metadata=metadata)
        return buffer.getvalue()


Data = Mapping[str, Any]


def layer_title(name: str) -> str:
    """ "layer 2" of "blocks.2.moe"; a layer without number keeps its last name."""
    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return f"layer {numbers[-1]}" if numbers else parts[-1]


def draw_participation(data: Data) -> list[Picture]:
    """A bar for each base, a panel for each layer, upwards where the model misses it."""
    layers, metric = data["layers"], data["metric"]
    factor, unit = (100, "percentage points") if metric.startswith(FRACTIONS) else (1, "nats")
    drops = [[factor * drop for drop in layer["drops"]] for layer in layers]
    figure, panels = _panels(len(layers), _bars_width(max(map(len, drops))), 2.8, share_y=True)
    scale = _signed_log_axis([drop for layer in drops for drop in layer if drop])
    for axes, layer, values in zip(panels, layers, drops, strict=True):
        # Logarithmic on both sides of zero: a base whose removal helps is shown, not cut off.
        scale(axes)
        better = [value < 0 for value in values]
        bars = axes.bar(range(len(values)), values, color=[ORANGE if less else BLUE for less in better], width=0.75)
        for bar, less in zip(bars, better, strict=True):
            bar.set_hatch("///" if less else None)
            bar.set_edgecolor("white")
        _mark(axes, [base for base, value in enumerate(values) if value == 0], "o", GREY)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(factor * layer["mean"], color="black", linewidth=1, linestyle="--")
        if layer["factor_alone"]:
            axes.axhline(factor * layer["factor_alone"], color=GREY, linewidth=1, linestyle=":")
        means = f"mean {factor * layer['mean']:.3g}, smallest {factor * layer['smallest']:.3g}"
        axes.set_title(f"{layer_title(layer['layer'])}\n{means}", loc="left", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_xlabel("expert base", fontsize=9)
        _tidy(axes)
    _ylabel(panels, f"loss of {metric}\n({unit})" if metric != "loss" else f"rise of the loss\n({unit})")
    every = [
        (value, layer["layer"], base)
        for layer, row in zip(layers, drops, strict=True)
        for base, value in enumerate(row)
    ]
    smallest, most = min(every), max(every)
    helpful = sum(value > 0 for value, _, _ in every)
    see = (
        f"Without one base the model is worse in {helpful} of {len(every)} cases. The largest drop is {most[0]:.3g} "
        f"{unit} (base {most[2]} of {layer_title(most[1])}), the smallest {smallest[0]:.3g}. "
        f"Orange, hatched bars below zero: better without the base. Grey dots: no difference. "
        f"Dashed: the layer's mean. Dotted: what the change of the factor does by itself."
    )
    rule = (
        "its coefficients set to 0 and 1/√E to 1/√(E−1)"
        if data["coefficients"] == "linear"
        else "its coefficients set to 0 and the others divided by their sum"
    )
    how = (
        f"Each expert base is taken out of all blocks of one layer at a time ({rule}), without retraining; {metric} of "
        f"{data['examples']} examples of the {data['split']} split, which is {data['full']:.4f} with all bases. "
        f"The axis is logarithmic on both sides of zero."
    )
    return [Picture("participation", "What the model loses without each expert base", see, how, figure)]


def draw_routing(data: Data) -> list[Picture]:
    """A heat map for each view, a panel for each layer."""
    return [_draw_view(view, data) for view in data["views"]]


def _draw_view(view: Data, data: Data) -> Picture:
    layers, unit = view["layers"], data["unit"]
    shown = _farthest(view)
    maps = [_matrix([layer["minus_uniform"][row] for row in shown], len(layer["choices"])) for layer in layers]
    widest = max(len(layer["choices"]) for layer in layers)
    figure, panels = _panels(len(layers), 0.9 + 0.2 * widest, 1.3 + 0.17 * len(shown), share_y=True)
    limit = max((float(np.nanmax(np.abs(values))) for values in maps if not np.isnan(values).all()), default=0) or 1.0
    for axes, layer, values in zip(panels, layers, maps, strict=True):
        image = _heat_map(axes, 100 * values, 100 * limit, layer_title(layer["layer"]))
        _number_columns(axes, layer["choices"], unit)
        axes.set_yticks(range(len(shown)), [view["labels"][row] for row in shown], fontsize=8)
    _ylabel(panels, view["name"])
    _colour_bar(figure, image, panels, "share minus uniform\n(percentage points)")
    row, column, layer, most = _strongest(view, layers)
    some = "" if len(shown) == len(view["labels"]) else f" Shown are {len(shown)} of {len(view['labels'])} rows, those "
    some += "" if not some else "farthest from uniform; the data has all."
    see = (
        f"Red: the {unit} gets more of these tokens than its equal share, blue: fewer, grey: no such token. "
        f"The strongest preference is of {view['name']} {view['labels'][row]} for {unit} {column} in "
        f"{layer_title(layer)}: {100 * most:+.1f} percentage points.{some}"
        if layer
        else "No token had a label."
    )
    how = (
        f"Of all assignments of tokens with a label, the share of each {unit}, minus one over the number of {unit}s. "
        f"Every choice of a token counts as one assignment; padding never counts. {data['examples']} examples of the "
        f"{data['split']} split."
    )
    name = f"routing-{view['name'].replace(' ', '-')}"
    return Picture(name, f"Where tokens go, by {view['name']}", see, how, figure)


def _farthest(view: Data) -> list[int]:
    """The rows to show, in their order: all, or the ``MOST_ROWS`` with the largest deviation in any layer."""
    rows = range(len(view["labels"]))
    if len(rows) <= MOST_ROWS:
        return list(rows)

    def distance(row: int) -> float:
        return max((max(map(abs, layer["minus_uniform"][row] or [0])) for layer in view["layers"]), default=0)

    return sorted(sorted(rows, key=distance, reverse=True)[:MOST_ROWS])


def _strongest(view: Data, layers: Sequence[Data]) -> tuple[int, int, str, float]:
    """(row, column's number, layer, value) of the largest share; an empty layer where there is none."""
    found = (0, 0, "", -math.inf)
    for layer in layers:
        for row, values in enumerate(layer["minus_uniform"]):
            for column, value in zip(layer["choices"], values or [], strict=False):
                if value > found[3]:
                    found = (row, column, layer["layer"], value)
    return found


def draw_recipes(data: Data) -> list[Picture]:
    """Blocks by bases, a column of panels for each layer, a row for each path."""
    layers = list(dict.fromkeys(found["layer"] for found in data["layers"]))
    paths = list(dict.fromkeys(found["path"] for found in data["layers"]))
    by_place = {(found["path"], found["layer"]): found for found in data["layers"]}
    blocks, bases = (max(sizes) for sizes in zip(*(np.shape(f["normalised"]) for f in data["layers"]), strict=True))
    size = (len(layers) * (0.8 + 0.16 * bases) + 1, len(paths) * (1.0 + 0.16 * blocks) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(paths), len(layers), squeeze=False)
    limit = max(float(np.abs(found["normalised"]).max()) for found in data["layers"]) or 1.0
    for row, path in enumerate(paths):
        for column, layer in enumerate(layers):
            found, axes = by_place[path, layer], panels[row][column]
            cosine = "" if found["mean_cosine"] is None else f"\ncosine {found['mean_cosine']:.3f}"
            image = _heat_map(axes, np.array(found["normalised"]), limit, f"{layer_title(layer)}, {path}{cosine}")
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            if row == len(paths) - 1:
                axes.set_xlabel("expert base", fontsize=9)
        panels[row][0].set_ylabel("block", fontsize=9)
    _colour_bar(figure, image, panels, "coefficient,\nrows of length 1")
    means = [
        f"{path}: " + ", ".join(f"{by_place[path, layer]['mean_cosine']:.3f}" for layer in layers)
        for path in paths
        if by_place[path, layers[0]]["mean_cosine"] is not None
    ]
    see = (
        "Rows that look alike are blocks composed alike (cosine 1: the same recipe, 0: nothing in common). "
        "Red: the base is added, blue: subtracted. Mean cosine by layer, first to last: "
        f"{'; '.join(means) or 'one block only'}."
    )
    how = (
        "The coefficients that the hypernetwork gives each block, each block's row divided by its length. "
        "The cosine is the mean over all pairs of blocks."
    )
    return [Picture("recipes", "How each block is composed", see, how, figure)]


def draw_load(data: Data) -> list[Picture]:
    """Assignments of each expert or block over their mean, a panel for each layer."""
    layers, unit = data["layers"], data["unit"]
    widest = max(len(layer["present"]) for layer in layers)
    figure, panels = _panels(len(layers), _bars_width(widest), 2.6, share_y=True)
    for axes, layer in zip(panels, layers, strict=True):
        counts = [layer["counts"][index] for index in layer["present"]]
        mean = sum(counts) / len(counts) or 1
        axes.bar(range(len(counts)), [count / mean for count in counts], color=BLUE, width=0.75)
        _mark(axes, [place for place, count in enumerate(counts) if count == 0], "x", ORANGE)
        axes.axhline(1, color="black", linewidth=1, linestyle="--")
        active = f"{layer['active']:.3g} a token, {len(layer['dead'])} dead"
        axes.set_title(f"{layer_title(layer['layer'])}\n{active}", loc="left", fontsize=9)
        _number_columns(axes, layer["present"], unit)
        _tidy(axes)
    _ylabel(panels, "load / mean load")
    dead = sum(len(layer["dead"]) for layer in layers)
    worst = max(layers, key=lambda layer: layer["worst_case"] or 0)
    see = (
        f"Bars of equal height are an even load (dashed: the mean). The most uneven is {layer_title(worst['layer'])}, "
        f"whose fullest {unit} has {worst['worst_case'] or 0:.2f} times the mean. "
        + (f"{dead} {unit}s got no token (orange crosses)." if dead else f"Every {unit} got tokens.")
    )
    how = (
        f"Assignments of the tokens of {data['examples']} examples of the {data['split']} split; padding never counts."
    )
    return [Picture("load", f"Load of each {unit} on evaluated examples", see, how, figure)]


def draw_training(data: Data) -> list[Picture]:
    """The loss and the deciding metric, and where they were recorded the loads, over the steps."""
    curves = {(curve["split"], curve["name"]): curve for curve in data["curves"]}
    metric = data["metric"]
    names = ["loss"] if metric == "loss" else ["loss", metric]
    pictures = [_draw_curves("training", names, curves)]
    best = "highest" if data["higher_is_better"] else "lowest"
    valid = curves.get(("valid", metric))
    see = "Training and validation loss should fall together; where validation turns up, the model learns by heart."
    if valid:
        extreme = (max if data["higher_is_better"] else min)(valid["values"])
        step = valid["steps"][valid["values"].index(extreme)]
        see += f" The {best} {metric} on validation is {extreme:.4f}, at step {step}."
    how = "From metrics.jsonl. Training values are means since the line before, evaluations are of whole splits."
    found = [Picture("training", "Loss and metric over training", see, how, pictures[0])]
    loads = [name for name in LOAD_TITLES if ("train", name) in curves]
    if loads:
        shown = [name for name in loads if name != "dropped" or any(curves["train", name]["values"])]
        ends = ", ".join(f"{name.replace('_', ' ')} {curves['train', name]['values'][-1]:.3g}" for name in loads)
        see = f"How evenly tokens were spread while training; flat lines near 1 are even. At the end: {ends}."
        how = "From metrics.jsonl: the loads since the line before, as means over the layers that choose."
        figure = _draw_curves("load", shown, curves)
        found.append(Picture("load-training", "Load over training", see, how, figure))
    return found


def _draw_curves(name: str, names: Sequence[str], curves: Mapping[tuple[str, str], Data]) -> Figure:
    figure, panels = _panels(len(names), 3.4, 2.6)
    styles = {"train": (BLUE, "-", None, 4), "valid": (ORANGE, "--", "o", 4), "test": ("black", "", "*", 9)}
    for axes, wanted in zip(panels, names, strict=True):
        for split, (colour, line, marker, size) in styles.items():
            curve = curves.get((split, wanted))
            if curve:
                look = {"color": colour, "linestyle": line, "markersize": size, "label": split}
                look["marker"] = marker or ("o" if len(curve["steps"]) == 1 else None)
                axes.plot(curve["steps"], curve["values"], **look)
        axes.set_title(LOAD_TITLES.get(wanted, wanted), loc="left", fontsize=9)
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        _tidy(axes)
    if name == "training":
        panels[0].legend(fontsize=8, frameon=False)
    return figure


DRAWERS: dict[str, Callable[[Data], list[Picture]]] = {
    "participation": draw_participation,
    "routing": draw_routing,
    "recipes": draw_recipes,
    "load": draw_load,
    "training": draw_training,
}
"""Name of a data file → what draws it."""


def _panels(number: int, width: float, height: float, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """``number`` axes, at most about 14 inches beside each other."""
    columns = max(1, min(number, int(14 // width)))
    rows = -(-number // columns)
    figure = Figure(figsize=(max(4.5, columns * width + 1), rows * height + 0.2), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y).flatten()
    for axes in grid[number:]:
        axes.set_visible(False)
    return figure, list(grid[:number])


def _bars_width(bars: int) -> float:
    """Inches of a panel: bars of one width while they are few, then narrower ones, three panels in a row."""
    return min(1.2 + 0.2 * bars, 4.6)


def _mark(axes: Axes, places: Sequence[int], marker: str, colour: str) -> None:
    """Markers on the zero line, where a bar has no height."""
    if places:
        axes.plot(places, [0] * len(places), linestyle="", marker=marker, markersize=4, color=colour, clip_on=False)


def _signed_log_axis(values: Sequence[float]) -> Callable[[Axes], None]:
    """What makes an axis logarithmic on both sides of zero, linear only below the smallest of the values."""
    sizes = [abs(value) for value in values] or [1.0]
    low, high = (math.floor(math.log10(size)) for size in (min(sizes), max(sizes)))
    steps = (1, 2, 5) if high - low < 2 else (1,)
    marks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    marks = [mark for mark in marks if min(sizes) / 2 <= mark <= 1.5 * max(sizes)]
    ends = [1.5 * sign * max([sign * value for value in values if sign * value > 0], default=0) for sign in (-1, 1)]
    ticks = [tick for tick in (*(-mark for mark in marks), 0, *marks) if ends[0] <= tick <= ends[1]]

    def apply(axes: Axes) -> None:
        axes.set_yscale("symlog", linthresh=min(sizes), linscale=0.5)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks([], minor=True)
        axes.set_ylim(*(ends if any(ends) else (-1, 1)))
        axes.grid(axis="y", color=GRID, linewidth=0.6)

    return apply


def _heat_map(axes: Axes, values: np.ndarray, limit: float, title: str) -> Any:
    """Symmetric colours, so that white is 0; grey where there is nothing."""
    axes.set_facecolor("#cccccc")
    image = axes.imshow(
        np.ma.masked_invalid(values), cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
    )
    axes.set_title(title, loc="left", fontsize=9)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    return image


def _matrix(rows: Sequence[Sequence[float] | None], columns: int) -> np.ndarray:
    return np.array([[math.nan] * columns if row is None else row for row in rows], dtype=float)


def _number_columns(axes: Axes, numbers: Sequence[int], unit: str) -> None:
    step = -(-len(numbers) // 16)
    axes.set_xticks(range(0, len(numbers), step), [str(number) for number in numbers[::step]], fontsize=8)
    axes.set_xlabel(unit, fontsize=9)


def _colour_bar(figure: Figure, image: Any, panels: Any, title: str) -> None:
    bar = figure.colorbar(image, ax=panels, shrink=0.9, aspect=25)
    bar.set_label(title, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def _ylabel(panels: Sequence[Axes], text: str) -> None:
    """On the leftmost of each row."""
    for axes in panels:
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel(text, fontsize=9)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
