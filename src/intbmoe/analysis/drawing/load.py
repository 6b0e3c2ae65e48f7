"""Loads of experts or blocks on evaluated examples and over training, and losses and metrics over training."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from intbmoe.checks import counted
from intbmoe.report import canvas
from intbmoe.report.canvas import Data, Picture, layer_title, make_panels, tidy
from intbmoe.report.style import BLUE, NOTHING, ORANGE, PHONE_INCHES, PHONE_POINTS
from intbmoe.tasks.serving.requests import spread_evenly

MOST_LAYERS = 8  # most lines in a panel; if there are more layers, evenly spread ones are shown
PANELS = {
    **{name: canvas.LOAD_TITLES[name] for name in ("utilisation", "worst_case", "entropy")},
    "dead": "{unit}s without a token",
    "active": "{unit}s of a token",
    "dropped": canvas.LOAD_TITLES["dropped"],
    "untaken": "share of tokens without {unit}",
}
ONLY_IF_ANY = ("dropped", "untaken")  # panels left out if it never happened
FREE_AXES = ("utilisation", "worst_case", "entropy", *ONLY_IF_ANY)  # need not begin at 0; numbers of experts must
LINES = ("-", "--", "-.", ":")
TITLES = {**canvas.LOAD_TITLES, "untaken": "share of tokens without expert"}


def draw_load(data: Data) -> list[Picture]:
    layers, unit = data["layers"], data["unit"]
    widest = max(len(layer["present"]) for layer in layers)
    width = canvas.bars_width(widest)
    figure, panels = make_panels(len(layers), width, 2.6, "load / mean load")
    for axes, layer in zip(panels, layers, strict=True):
        counts = [layer["counts"][index] for index in layer["present"]]
        mean = sum(counts) / len(counts) or 1
        axes.bar(range(len(counts)), [count / mean for count in counts], color=BLUE, width=0.75)
        if empty := [place for place, count in enumerate(counts) if count == 0]:
            axes.plot(empty, [0] * len(empty), linestyle="", marker="x", markersize=4, color=ORANGE, clip_on=False)
        axes.axhline(1, color="black", linewidth=1, linestyle="--")
        active = f"{layer['active']:.3g} a token, {len(layer['dead'])} dead"
        canvas.number_columns(axes, layer["present"], unit, (width - 0.7) / len(layer["present"]))
        tidy(axes, f"{layer_title(layer['layer'])}\n{active}")
    dead = sum(len(layer["dead"]) for layer in layers)
    crosses = "an orange cross" if dead == 1 else "orange crosses"
    worst = max(layers, key=lambda layer: layer["worst_case"] or 0)
    see = (
        f"Bars of equal height mean an even load (dashed: the mean). The most uneven is {layer_title(worst['layer'])}, "
        f"whose fullest {unit} has {worst['worst_case'] or 0:.2f} times the mean. "
        + (f"{counted(dead, unit)} got no token ({crosses})." if dead else f"Every {unit} got tokens.")
        + _left_out(layers)
    )
    how = (
        f"Assignments of the tokens in {data['examples']} examples of the {data['split']} split; padding never counts."
    )
    found = [Picture("load", f"Load of each {unit} on evaluated examples", see, how, figure)]
    varied = any(sum(count > 0 for count in layer.get("tokens_by_choices", [])) > 1 for layer in layers)
    return [*found, _draw_choices(data)] if varied else found


def _left_out(layers: Sequence[Data]) -> str:
    dropping = [layer for layer in layers if layer.get("dropped") is not None]
    words = ""
    if dropping:
        shares = ", ".join(f"{100 * layer['dropped']:.3g} %" for layer in dropping)
        words += f" Dropped assignments by layer, first to last: {shares}."
    if any(layer.get("untaken") for layer in layers):
        shares = ", ".join(f"{100 * layer['untaken']:.3g} %" for layer in layers)
        words += f" Tokens without any expert: {shares}."
    return words


def _draw_choices(data: Data) -> Picture:
    """How many experts or blocks a token has, if that varies."""
    layers, unit = data["layers"], data["unit"]
    widest = max(len(layer["tokens_by_choices"]) for layer in layers)
    figure, panels = make_panels(len(layers), canvas.bars_width(widest), 2.6, "share of the tokens (%)")
    for axes, layer in zip(panels, layers, strict=True):
        shares = [100 * count / max(1, layer["tokens"]) for count in layer["tokens_by_choices"]]
        axes.bar(range(len(shares)), shares, color=[ORANGE, *[BLUE] * (len(shares) - 1)], width=0.75)
        axes.axvline(layer["active"], color="black", linewidth=1, linestyle="--")
        tidy(axes, f"{layer_title(layer['layer'])}\nmean {layer['active']:.3g}", f"{unit}s of a token", ticks=8)
    means = ", ".join(f"{layer['active']:.3g}" for layer in layers)
    see = (
        f"How the number of {unit}s varies from token to token (dashed: the mean; by layer, first to last: {means}). "
        f"An orange bar at 0 shows tokens that no {unit} computes: only the residual path carries them."
    )
    how = (
        f"Choices of each token of {data['examples']} examples of the {data['split']} split, after any capacity; "
        "padding never counts."
    )
    return Picture("load-choices", f"How many {unit}s a token has", see, how, figure)


def draw_load_training(data: Data) -> list[Picture]:
    return [_draw_experts(data), _draw_layers(data)]


def _draw_experts(data: Data) -> Picture:
    layers, unit = data["layers"], data["unit"]
    maps = [relative_loads(layer["counts"]) for layer in layers]
    tallest = max(len(values) for values in maps)
    figure, panels = make_panels(len(layers), PHONE_INCHES / 2, 1.2 + canvas.rows_height(tallest), unit)
    most = max(float(np.nanmax(values, initial=0)) for values in maps)
    limit = min(max(2.0, most), 4.0)
    for axes, layer, values in zip(panels, layers, maps, strict=True):
        axes.set_facecolor(NOTHING)
        across, down = _edges(layer["steps"]), np.arange(len(values) + 1) - 0.5
        look = {"cmap": "cividis", "vmin": 0, "vmax": limit, "rasterized": True}
        image = axes.pcolormesh(across, down, np.ma.masked_invalid(values), **look)
        axes.set_ylim(tallest - 0.5, -0.5)
        axes.set_title(layer_title(layer["layer"]), loc="left", fontsize=PHONE_POINTS)
        axes.set_xlabel("step", fontsize=PHONE_POINTS)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=PHONE_POINTS - 1)
    cut = f" (brightest: {limit:g} or more)" if most > limit else ""
    canvas.colour_bar(figure, image, panels, f"load / mean load{cut}")
    ends = ", ".join(f"{layer['worst_case'][-1] or 0:.2f}" for layer in layers)
    see = (
        f"One row is one {unit}: the brighter, the more tokens it got; an even load is one colour everywhere. A row "
        f"that turns dark is a {unit} that the router no longer uses. Largest load relative to the mean at the "
        f"end, by layer, first to last: {ends}."
    )
    if any(count is None for layer in layers for window in layer["counts"] for count in window):
        see += f" Grey: not open at that time; a {unit} opened at the very end of a window has no token in it."
    how = f"From loads.jsonl: assignments of each {unit} since the previous line, divided by their mean."
    return Picture("load-experts", f"Load of each {unit} over training", see, how, figure)


def relative_loads(counts: Sequence[Sequence[int | None]]) -> np.ndarray:
    """(experts, windows): each count divided by the mean of its window; NaN if an expert is not open."""
    values = np.array([[np.nan if count is None else count for count in window] for window in counts], dtype=float)
    mean = np.nanmean(values, axis=1, keepdims=True)
    return (values / np.where(mean > 0, mean, 1)).T


def _edges(steps: Sequence[int]) -> list[int]:
    """The edges of the windows: each begins where the previous one ends."""
    return [2 * steps[0] - steps[1] if len(steps) > 1 else 0, *steps]


def _draw_layers(data: Data) -> Picture:
    layers, unit = data["layers"], data["unit"]
    shown = [layers[place] for place in spread_evenly(len(layers), MOST_LAYERS)]
    names = [name for name in PANELS if name not in ONLY_IF_ANY or any(any(layer[name] or []) for layer in layers)]
    figure, panels = make_panels(len(names), PHONE_INCHES / 2, 2.5)
    colours = canvas.block_colours(len(shown))
    for axes, name in zip(panels, names, strict=True):
        for place, layer in enumerate(shown):
            if layer[name] is not None:
                values = [np.nan if value is None else value for value in layer[name]]
                look = {"color": colours[place], "linestyle": LINES[place % 4], "label": layer_title(layer["layer"])}
                axes.plot(layer["steps"], values, marker="o" if len(values) == 1 else None, **look)
        tidy(axes, _two_lines(PANELS[name].format(unit=unit)), "step", ticks=5, grid="y")
        if name not in FREE_AXES:
            axes.set_ylim(bottom=0, top=None if axes.get_ylim()[1] > 0.1 else 1)
        if name == "dead":
            axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    _add_legend(figure)
    last = max(layers, key=lambda layer: layer["dead"][-1])
    dead = f"most in {layer_title(last['layer'])}, {last['dead'][-1]}" if last["dead"][-1] else "none"
    dropped = max(max(layer["dropped"]) for layer in layers)
    untaken = [max(layer["untaken"]) for layer in layers if layer["untaken"]]
    see = f"One line per layer. {unit.capitalize()}s without a token at the end: {dead}. "
    see += f"Most assignments dropped in a window: {100 * dropped:.3g} %." if dropped else "No assignment was dropped."
    if untaken:
        see += f" Most tokens without {unit} in a window: {100 * max(untaken):.3g} %."
    if len(shown) < len(layers):
        see += f" Shown are {len(shown)} of {len(layers)} layers, evenly spread; the data has all."
    how = (
        "From the counts in loads.jsonl, each since the previous line. Utilisation is the share of those open that got "
        "tokens, entropy is that of the loads divided by its maximum, dropped are assignments to a full expert."
    )
    return Picture("load-layers", "How evenly each layer spread its tokens", see, how, figure)


def draw_training(data: Data) -> list[Picture]:
    curves = {(curve["split"], curve["name"]): curve for curve in data["curves"]}
    metric = data["metric"]
    names = ["loss"] if metric == "loss" else ["loss", metric]
    figure = _draw_curves(names, curves)
    _add_legend(figure)
    best = "highest" if data["higher_is_better"] else "lowest"
    valid = curves.get(("valid", metric))
    see = "Training and validation loss should fall together; where the validation loss rises, the model overfits."
    if valid:
        extreme = (max if data["higher_is_better"] else min)(valid["values"])
        step = valid["steps"][valid["values"].index(extreme)]
        see += f" The {best} {metric} on validation is {extreme:.4f}, at step {step}."
    how = "From metrics.jsonl. Training values are means since the previous line, evaluations are on whole splits."
    found = [Picture("training", "Loss and metric over training", see, how, figure)]
    loads = [name for name in TITLES if ("train", name) in curves]
    if loads:
        shown = [name for name in loads if name != "dropped" or any(curves["train", name]["values"])]
        ends = ", ".join(f"{name.replace('_', ' ')} {curves['train', name]['values'][-1]:.3g}" for name in loads)
        see = f"How evenly tokens were spread while training; flat lines near 1 are even. At the end: {ends}."
        how = "From metrics.jsonl: the loads since the previous line, as means over the layers that choose."
        found.append(Picture("load-training", "Load over training", see, how, _draw_curves(shown, curves)))
    return found


def _draw_curves(names: Sequence[str], curves: Mapping[tuple[str, str], Data]) -> Figure:
    figure, panels = make_panels(len(names), PHONE_INCHES / 2, 2.5)
    styles = {"train": (BLUE, "-", None, 4), "valid": (ORANGE, "--", "o", 4), "test": ("black", "", "*", 9)}
    for axes, wanted in zip(panels, names, strict=True):
        for split, (colour, line, marker, size) in styles.items():
            curve = curves.get((split, wanted))
            if curve:
                look = {"color": colour, "linestyle": line, "markersize": size, "label": split}
                look["marker"] = marker or ("o" if len(curve["steps"]) == 1 else None)
                axes.plot(curve["steps"], curve["values"], **look)
        tidy(axes, _two_lines(TITLES.get(wanted, wanted)), "step", ticks=5, grid="y")
    return figure


def _two_lines(title: str) -> str:
    """Put the part in brackets on a second line, because two panels share a row."""
    return title.replace(" (", "\n(")


def _add_legend(figure: Figure) -> None:
    """Add a legend of the first panel's lines below all panels, where it hides nothing."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=PHONE_POINTS)
