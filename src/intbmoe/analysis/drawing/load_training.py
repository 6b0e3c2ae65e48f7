"""Loads of every layer over training: of each expert or block, and what follows from them."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from intbmoe.report.canvas import (
    GRID,
    Data,
    Picture,
    block_colours,
    colour_bar,
    layer_title,
    make_panels,
    tidy,
    ylabel,
)

MOST_LAYERS = 8  # lines in a panel; of more layers, so many are shown, evenly spread
PANELS: dict[str, str] = {
    "utilisation": "utilisation (1: all get tokens)",
    "worst_case": "largest load / mean load (1: even)",
    "entropy": "entropy of the load (1: even)",
    "dead": "{unit}s without a token",
    "active": "{unit}s of a token",
    "dropped": "share of assignments dropped",
    "untaken": "share of tokens without {unit}",
}
ONLY_IF_ANY = ("dropped", "untaken")  # panels left out where nothing of the kind ever happened
FREE_AXES = ("utilisation", "worst_case", "entropy", *ONLY_IF_ANY)
"""Panels whose axis need not begin at 0; numbers of experts do."""
LINES = ("-", "--", "-.", ":")


def draw_load_training(data: Data) -> list[Picture]:
    return [_draw_experts(data), _draw_layers(data)]


def _draw_experts(data: Data) -> Picture:
    layers, unit = data["layers"], data["unit"]
    maps = [relative_loads(layer["counts"]) for layer in layers]
    tallest = max(len(values) for values in maps)
    figure, panels = make_panels(len(layers), 3.4, 1.3 + 0.16 * tallest, share_y=True)
    most = max(float(np.nanmax(values, initial=0)) for values in maps)
    limit = min(max(2.0, most), 4.0)
    for axes, layer, values in zip(panels, layers, maps, strict=True):
        axes.set_facecolor("#cccccc")
        image = axes.pcolormesh(
            _edges(layer["steps"]),
            np.arange(len(values) + 1) - 0.5,
            np.ma.masked_invalid(values),
            cmap="cividis",
            vmin=0,
            vmax=limit,
        )
        axes.set_ylim(tallest - 0.5, -0.5)
        axes.set_title(layer_title(layer["layer"]), loc="left", fontsize=9)
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8)
    ylabel(panels, unit)
    cut = f"\n(brightest: {limit:g} or more)" if most > limit else ""
    colour_bar(figure, image, panels, f"load / mean load{cut}")
    ends = ", ".join(f"{layer['worst_case'][-1] or 0:.2f}" for layer in layers)
    see = (
        f"One row is one {unit}: the brighter, the more tokens it got; an even load is one colour all over. A row that "
        f"turns dark is a {unit} that the router left. Largest load over the mean at the "
        f"end, by layer, first to last: {ends}."
    )
    if any(count is None for layer in layers for window in layer["counts"] for count in window):
        see += (
            f" Grey: not open at that time; a {unit} opened at the very end of a window stands there without a token."
        )
    how = f"From loads.jsonl: assignments of each {unit} since the line before, over their mean."
    return Picture("load-experts", f"Load of each {unit} over training", see, how, figure)


def relative_loads(counts: Sequence[Sequence[int | None]]) -> np.ndarray:
    """(experts, windows): each count over the mean of its window; NaN where an expert is not there."""
    values = np.array([[np.nan if count is None else count for count in window] for window in counts], dtype=float)
    mean = np.nanmean(values, axis=1, keepdims=True)
    return (values / np.where(mean > 0, mean, 1)).T


def _edges(steps: Sequence[int]) -> list[int]:
    """A window begins where the one before ends."""
    return [2 * steps[0] - steps[1] if len(steps) > 1 else 0, *steps]


def _draw_layers(data: Data) -> Picture:
    layers, unit = data["layers"], data["unit"]
    chosen = np.unique(np.linspace(0, len(layers) - 1, min(MOST_LAYERS, len(layers))).round().astype(int))
    shown = [layers[place] for place in chosen]
    names = [name for name in PANELS if name not in ONLY_IF_ANY or any(any(layer[name] or []) for layer in layers)]
    figure, panels = make_panels(len(names), 3.4, 2.6)
    colours = block_colours(len(shown))
    for axes, name in zip(panels, names, strict=True):
        _plot_layers(axes, shown, name, lambda place: {"color": colours[place], "linestyle": LINES[place % 4]})
        axes.set_title(PANELS[name].format(unit=unit), loc="left", fontsize=9)
        if name not in FREE_AXES:
            axes.set_ylim(bottom=0, top=None if axes.get_ylim()[1] > 0.1 else 1)
        if name == "dead":
            axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].legend(fontsize=7, frameon=False)
    last = max(layers, key=lambda layer: layer["dead"][-1])
    dead = f"most in {layer_title(last['layer'])}, {last['dead'][-1]}" if last["dead"][-1] else "none"
    dropped = max(max(layer["dropped"]) for layer in layers)
    untaken = [max(layer["untaken"]) for layer in layers if layer["untaken"]]
    see = f"Every layer by itself. {unit.capitalize()}s without a token at the end: {dead}. "
    see += f"Most assignments dropped in a window: {100 * dropped:.3g} %." if dropped else "No assignment was dropped."
    if untaken:
        see += f" Most tokens without {unit} in a window: {100 * max(untaken):.3g} %."
    if len(shown) < len(layers):
        see += f" Shown are {len(shown)} of {len(layers)} layers, evenly spread; the data has all."
    how = (
        "From the counts in loads.jsonl, each since the line before. Utilisation is the share of those open that got "
        "tokens, entropy that of the loads over its maximum; dropped are assignments that found their expert full."
    )
    return Picture("load-layers", "How evenly each layer spread its tokens", see, how, figure)


def _plot_layers(axes: Axes, layers: Sequence[Data], name: str, look: Callable[[int], dict[str, str]]) -> None:
    for place, layer in enumerate(layers):
        if layer[name] is None:
            continue
        values = [np.nan if value is None else value for value in layer[name]]
        marker = "o" if len(values) == 1 else None
        axes.plot(layer["steps"], values, marker=marker, label=layer_title(layer["layer"]), **look(place))
    axes.set_xlabel("step", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    tidy(axes)
