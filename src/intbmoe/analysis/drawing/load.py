"""Load of each expert or block on evaluated examples, and how many of them a token has."""

from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from intbmoe.report.canvas import (
    BLUE,
    ORANGE,
    Data,
    Picture,
    bars_width,
    layer_title,
    make_panels,
    mark,
    number_columns,
    tidy,
    ylabel,
)


def draw_load(data: Data) -> list[Picture]:
    layers, unit = data["layers"], data["unit"]
    widest = max(len(layer["present"]) for layer in layers)
    figure, panels = make_panels(len(layers), bars_width(widest), 2.6, share_y=True)
    for axes, layer in zip(panels, layers, strict=True):
        counts = [layer["counts"][index] for index in layer["present"]]
        mean = sum(counts) / len(counts) or 1
        axes.bar(range(len(counts)), [count / mean for count in counts], color=BLUE, width=0.75)
        mark(axes, [place for place, count in enumerate(counts) if count == 0], "x", ORANGE)
        axes.axhline(1, color="black", linewidth=1, linestyle="--")
        active = f"{layer['active']:.3g} a token, {len(layer['dead'])} dead"
        axes.set_title(f"{layer_title(layer['layer'])}\n{active}", loc="left", fontsize=9)
        number_columns(axes, layer["present"], unit)
        tidy(axes)
    ylabel(panels, "load / mean load")
    dead = sum(len(layer["dead"]) for layer in layers)
    worst = max(layers, key=lambda layer: layer["worst_case"] or 0)
    see = (
        f"Bars of equal height are an even load (dashed: the mean). The most uneven is {layer_title(worst['layer'])}, "
        f"whose fullest {unit} has {worst['worst_case'] or 0:.2f} times the mean. "
        + (f"{dead} {unit}s got no token (orange crosses)." if dead else f"Every {unit} got tokens.")
        + _left_out(layers)
    )
    how = (
        f"Assignments of the tokens of {data['examples']} examples of the {data['split']} split; padding never counts."
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
    """How many experts or blocks a token has, where that is not the same for all."""
    layers, unit = data["layers"], data["unit"]
    widest = max(len(layer["tokens_by_choices"]) for layer in layers)
    figure, panels = make_panels(len(layers), bars_width(widest), 2.6, share_y=True)
    for axes, layer in zip(panels, layers, strict=True):
        shares = [100 * count / max(1, layer["tokens"]) for count in layer["tokens_by_choices"]]
        axes.bar(range(len(shares)), shares, color=[ORANGE, *[BLUE] * (len(shares) - 1)], width=0.75)
        axes.axvline(layer["active"], color="black", linewidth=1, linestyle="--")
        axes.set_title(f"{layer_title(layer['layer'])}\nmean {layer['active']:.3g}", loc="left", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_xlabel(f"{unit}s of a token", fontsize=9)
        tidy(axes)
    ylabel(panels, "share of the tokens (%)")
    means = ", ".join(f"{layer['active']:.3g}" for layer in layers)
    see = (
        f"How the number of {unit}s varies from token to token (dashed: the mean; by layer, first to last: {means}). "
        f"An orange bar at 0 is tokens that no {unit} computes: only the residual path carries them."
    )
    how = (
        f"Choices of each token of {data['examples']} examples of the {data['split']} split, after any capacity; "
        "padding never counts."
    )
    return Picture("load-choices", f"How many {unit}s a token has", see, how, figure)
