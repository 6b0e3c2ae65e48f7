"""IntBMoE's expert bases: how blocks are composed of them, what is lost without each, what more of them cost."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from intbmoe.report import canvas
from intbmoe.report.canvas import BLUE, ORANGE, Data, Picture, layer_title, make_panels, tidy
from intbmoe.report.numbers import flops_unit

FRACTIONS = ("accuracy", "HR@", "NDCG@")  # beginnings of metrics that are shares: their differences are in points
MIB = 2**20
FORMS = {"": ("composed in every forward", BLUE, "-", "o"), "_precomposed": ("precomposed", ORANGE, "--", "s")}


def draw_coefficients(data: Data) -> list[Picture]:
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
            image = canvas.heat_map(axes, np.array(found["normalised"]), limit, f"{layer_title(layer)}, {path}{cosine}")
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            if row == len(paths) - 1:
                axes.set_xlabel("expert base", fontsize=9)
        panels[row][0].set_ylabel("block", fontsize=9)
    canvas.colour_bar(figure, image, panels, "coefficient,\nrows of length 1")
    means = [
        f"{path}: " + ", ".join(f"{by_place[path, layer]['mean_cosine']:.3f}" for layer in layers)
        for path in paths
        if by_place[path, layers[0]]["mean_cosine"] is not None
    ]
    see = (
        "Rows that look alike are blocks composed alike (cosine 1: the same coefficients, 0: nothing in common). "
        "Red: the base is added, blue: subtracted. Mean cosine by layer, first to last: "
        f"{'; '.join(means) or 'one block only'}."
    )
    how = (
        "The coefficients that the hypernetwork gives each block, each block's row divided by its length. "
        "The cosine is the mean over all pairs of blocks."
    )
    return [Picture("coefficients", "How each block is composed", see, how, figure)]


def draw_participation(data: Data) -> list[Picture]:
    layers, metric = data["layers"], data["metric"]
    factor, unit = (100, "percentage points") if metric.startswith(FRACTIONS) else (1, "nats")
    drops = [[factor * drop for drop in layer["drops"]] for layer in layers]
    told = f"loss of {metric}" if metric != "loss" else "rise of the loss"
    figure, panels = make_panels(len(layers), canvas.bars_width(max(map(len, drops))), 2.8, f"{told}\n({unit})")
    scale = signed_log_axis([drop for layer in drops for drop in layer if drop])
    for axes, layer, values in zip(panels, layers, drops, strict=True):
        # Logarithmic on both sides of zero: a base whose removal helps is shown, not cut off.
        scale(axes)
        better = [value < 0 for value in values]
        bars = axes.bar(range(len(values)), values, color=[ORANGE if less else BLUE for less in better], width=0.75)
        for bar, less in zip(bars, better, strict=True):
            bar.set_hatch("///" if less else None)
            bar.set_edgecolor("white")
        canvas.mark(axes, [base for base, value in enumerate(values) if value == 0], "o", canvas.GREY)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(factor * layer["mean"], color="black", linewidth=1, linestyle="--")
        if layer["factor_alone"]:
            axes.axhline(factor * layer["factor_alone"], color=canvas.GREY, linewidth=1, linestyle=":")
        means = f"mean {factor * layer['mean']:.3g}, smallest {factor * layer['smallest']:.3g}"
        tidy(axes, f"{layer_title(layer['layer'])}\n{means}", "expert base", ticks=8)
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
        axes.grid(axis="y", color=canvas.GRID, linewidth=0.6)

    return apply


def draw_cost(data: Data) -> list[Picture]:
    rows = data["sweep"]
    unit, letter = flops_unit(row["flops"] for row in rows)
    wanted = {"memory": (MIB, "peak inference memory (MiB)"), "flops": (unit, f"FLOPs of one example ({letter})")}
    if all(row["allocated"] is not None for row in rows):
        wanted["allocated"] = (MIB, f"peak allocated on {data['device']} (MiB)")
    figure = draw_panels(rows, wanted, data["experts"])
    first, last = rows[0], rows[-1]
    see = (
        f"Composed beforehand, the model costs the same whatever E: {last['memory_precomposed'] / MIB:.3g} MiB and "
        f"{last['flops_precomposed'] / unit:.3g} {letter}FLOPs. Composed in every forward, from E={first['experts']} "
        f"to E={last['experts']} memory grows from {first['memory'] / MIB:.3g} to {last['memory'] / MIB:.3g} MiB and "
        f"FLOPs from {first['flops'] / unit:.3g} to {last['flops'] / unit:.3g} {letter}. Grey line: this run's E. "
        "With few bases the composed blocks take more memory than the bases do."
    )
    how = (
        "The run's model built anew for every E, one example, one forward without gradients. Memory: bytes of all "
        "tensors alive at once, parameters included. FLOPs: 2 × multiply-adds of matrix products, attention's score "
        "and value products left out."
    )
    if data["too_large"]:
        how += f" Left out, too large to hold here: E={', '.join(map(str, data['too_large']))}."
    return [Picture("cost", "Cost of inference against the number of expert bases", see, how, figure)]


def draw_panels(rows: Sequence[Data], wanted: Mapping[str, tuple[float, str]], own: int | None = None) -> Figure:
    """A panel for each of the ``wanted`` columns, with its unit and title; rings where a row has the paper's figure."""
    experts = [row["experts"] for row in rows]
    figure, panels = make_panels(len(wanted), 4.2, 3.0)
    for axes, (name, (divisor, title)) in zip(panels, wanted.items(), strict=True):
        if own is not None:
            axes.axvline(own, color="#bbbbbb", linewidth=4, zorder=0)
        for suffix, (label, colour, line, marker) in FORMS.items():
            values = [row[name + suffix] / divisor for row in rows]
            axes.plot(experts, values, color=colour, linestyle=line, marker=marker, markersize=4, label=label)
            papers = [(row["experts"], row.get("paper", {})) for row in rows]
            printed = [(count, paper[name + suffix]) for count, paper in papers if name + suffix in paper]
            if printed:
                ring = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "linestyle": "", "zorder": 3}
                axes.plot(*zip(*printed, strict=True), color=colour, label=f"the paper's, {label}", **ring)
        axes.set_xscale("log", base=2)
        axes.set_xticks(experts, [str(count) for count in experts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        tidy(axes, title, "expert bases E", grid="y")
    panels[0].legend(fontsize=8, frameon=False)
    return figure
