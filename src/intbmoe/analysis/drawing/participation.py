"""What the model loses without each expert base."""

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from intbmoe.report.canvas import (
    BLUE,
    GREY,
    GRID,
    ORANGE,
    Data,
    Picture,
    bars_width,
    layer_title,
    make_panels,
    mark,
    tidy,
    ylabel,
)

FRACTIONS = ("accuracy", "HR@", "NDCG@")
"""Beginnings of metrics that are shares, and whose differences are told in percentage points."""


def draw_participation(data: Data) -> list[Picture]:
    layers, metric = data["layers"], data["metric"]
    factor, unit = (100, "percentage points") if metric.startswith(FRACTIONS) else (1, "nats")
    drops = [[factor * drop for drop in layer["drops"]] for layer in layers]
    figure, panels = make_panels(len(layers), bars_width(max(map(len, drops))), 2.8, share_y=True)
    scale = signed_log_axis([drop for layer in drops for drop in layer if drop])
    for axes, layer, values in zip(panels, layers, drops, strict=True):
        # Logarithmic on both sides of zero: a base whose removal helps is shown, not cut off.
        scale(axes)
        better = [value < 0 for value in values]
        bars = axes.bar(range(len(values)), values, color=[ORANGE if less else BLUE for less in better], width=0.75)
        for bar, less in zip(bars, better, strict=True):
            bar.set_hatch("///" if less else None)
            bar.set_edgecolor("white")
        mark(axes, [base for base, value in enumerate(values) if value == 0], "o", GREY)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(factor * layer["mean"], color="black", linewidth=1, linestyle="--")
        if layer["factor_alone"]:
            axes.axhline(factor * layer["factor_alone"], color=GREY, linewidth=1, linestyle=":")
        means = f"mean {factor * layer['mean']:.3g}, smallest {factor * layer['smallest']:.3g}"
        axes.set_title(f"{layer_title(layer['layer'])}\n{means}", loc="left", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_xlabel("expert base", fontsize=9)
        tidy(axes)
    ylabel(panels, f"loss of {metric}\n({unit})" if metric != "loss" else f"rise of the loss\n({unit})")
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


def signed_log_axis(values: Sequence[float]) -> Callable[[Axes], None]:
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
