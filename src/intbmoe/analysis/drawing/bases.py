"""IntBMoE's expert bases: how blocks are composed from them, what is lost without each, and what more of them cost."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from intbmoe.analysis.page import told_participation
from intbmoe.report import canvas
from intbmoe.report.canvas import Data, Picture, layer_title, make_panels, tidy
from intbmoe.report.numbers import flops_unit, format_difference
from intbmoe.report.style import BLUE, GREY, ORANGE, PALE, PHONE_INCHES, PHONE_POINTS

SMALLEST_AXIS = 0.01  # the smallest range of the participation axis, relative to the whole loss
MIB = 2**20
FORMS = {"": ("composed in every forward", BLUE, "-", "o"), "_precomposed": ("precomposed", ORANGE, "--", "s")}


def draw_coefficients(data: Data) -> list[Picture]:
    layers = list(dict.fromkeys(found["layer"] for found in data["layers"]))
    paths = list(dict.fromkeys(found["path"] for found in data["layers"]))
    by_place = {(found["path"], found["layer"]): found for found in data["layers"]}
    blocks = max(len(found["normalised"]) for found in data["layers"])
    height = len(layers) * (0.7 + canvas.rows_height(blocks)) + 0.9
    figure = Figure(figsize=(PHONE_INCHES, height), layout="constrained")
    panels = figure.subplots(len(layers), len(paths), squeeze=False)
    limit = max(float(np.abs(found["normalised"]).max()) for found in data["layers"]) or 1.0
    for row, layer in enumerate(layers):
        for column, path in enumerate(paths):
            found, axes = by_place[path, layer], panels[row][column]
            cosine = "" if found["mean_cosine"] is None else f": cosine {found['mean_cosine']:.3f}"
            image = canvas.heat_map(axes, np.array(found["normalised"]), limit, f"{layer_title(layer)}, {path}{cosine}")
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            if row == len(layers) - 1:
                axes.set_xlabel("expert base", fontsize=PHONE_POINTS)
        panels[row][0].set_ylabel("block", fontsize=PHONE_POINTS)
    canvas.colour_bar(figure, image, panels, "coefficient, rows of length 1")
    means = [
        f"{path}: " + ", ".join(f"{by_place[path, layer]['mean_cosine']:.3f}" for layer in layers)
        for path in paths
        if by_place[path, layers[0]]["mean_cosine"] is not None
    ]
    see = (
        "Rows that look alike are blocks with similar compositions (cosine 1: the same coefficients, 0: nothing in "
        "common). Red: the base is added, blue: subtracted. Mean cosine by layer, first to last: "
        f"{'; '.join(means) or 'one block only'}."
    )
    how = (
        "The coefficients that the hypernetwork computes for each block, each block's row divided by its length. "
        "The cosine is the mean over all pairs of blocks."
    )
    return [Picture("coefficients", "How each block is composed", see, how, figure)]


def draw_participation(data: Data) -> list[Picture]:
    """Draw bars from zero on a linear axis, with two standard errors, and a second axis in per cent of the loss."""
    layers, loss = data["layers"], data["full_loss"]
    width = canvas.bars_width(max(len(layer["rises"]) for layer in layers))
    figure, panels = make_panels(len(layers), width, 3.2, "rise of the loss")
    reach = [(rise, 2 * (error or 0)) for of in layers for rise, error in zip(of["rises"], of["errors"], strict=True)]
    # A rise of a thousandth of the loss should look small, however small the others are.
    ends = (
        min(-SMALLEST_AXIS * loss / 4, *(rise - error for rise, error in reach)),
        max(SMALLEST_AXIS * loss, *(rise + error for rise, error in reach)),
    )
    for axes, layer in zip(panels, layers, strict=True):
        axes.set_ylim(*(1.08 * end for end in ends))
        draw_rises(axes, layer)
    if loss > 0:
        share = panels[-1].secondary_yaxis("right", functions=(lambda y: 100 * y / loss, lambda y: y * loss / 100))
        share.set_ylabel("% of the loss with all bases", fontsize=PHONE_POINTS)
        share.tick_params(labelsize=PHONE_POINTS - 1)
        share.spines["right"].set_visible(False)
    rule = (
        "its coefficients set to 0 and 1/√E to 1/√(E−1)"
        if data["coefficients"] == "linear"
        else "its coefficients set to 0 and the others divided by their sum"
    )
    how = (
        f"Each expert base is removed from all blocks of one layer at a time ({rule}), without retraining. The loss is "
        f"the mean over {data['examples']} examples of the {data['split']} split, {loss:.4g} with all bases. Both "
        f"models see the same examples, so the standard error is that of paired differences; it covers other "
        f"examples, not other training runs. Certain: Student's t, one-sided, with Holm's correction at 5 %."
    )
    see = f"{_told_removals(data)} Whiskers: two standard errors. Dashed: the layer's mean. "
    see += "Dotted: the effect of the changed factor alone. " if any(of["factor_alone"] for of in layers) else ""
    return [Picture("participation", "What the model loses without each expert base", see.strip(), how, figure)]


def draw_rises(axes: Axes, layer: Data) -> None:
    """Draw the bars of one layer, with whiskers if there are standard errors."""
    rises, errors = layer["rises"], layer["errors"]
    bars = axes.bar(range(len(rises)), rises, color=[ORANGE if rise < 0 else BLUE for rise in rises], width=0.75)
    for bar, rise in zip(bars, rises, strict=True):
        bar.set(hatch="///" if rise < 0 else None, edgecolor="white", linewidth=0)
    if None not in errors:
        whiskers = [2 * error for error in errors]
        axes.errorbar(range(len(rises)), rises, yerr=whiskers, fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhline(layer["mean"], color="black", linewidth=1, linestyle="--")
    if layer["factor_alone"]:
        axes.axhline(layer["factor_alone"], color=GREY, linewidth=1.5, linestyle=":")
    title = f"{layer_title(layer['layer'])}\nmean {layer['mean']:.3g}\nsmallest {layer['smallest']:.3g}"
    tidy(axes, title, "expert base", ticks=8, grid="y")


def _told_removals(data: Data) -> str:
    """Say how many removals hurt, how certain that is, and what the deciding metric shows."""
    every = [(rise, layer["layer"], base) for layer in data["layers"] for base, rise in enumerate(layer["rises"])]
    most, least = max(every), min(every)
    drops = [drop for layer in data["layers"] for drop in layer["drops"]]
    low, high = (format_difference(data["metric"], end, "points", "+") for end in (min(drops), max(drops)))
    beside = "" if data["metric"] == "loss" else f" By {data['metric']} the model is worse by {low} to {high}."
    return (
        f"{told_participation(data)} The largest rise is {most[0]:.3g} (base {most[2]} of {layer_title(most[1])}), the "
        f"smallest {least[0]:.3g}; orange, hatched bars below zero: a lower loss without the base.{beside}"
    )


def draw_cost(data: Data) -> list[Picture]:
    rows = data["sweep"]
    unit, letter = flops_unit(row["flops"] for row in rows)
    wanted = {"memory": (MIB, "peak inference memory (MiB)"), "flops": (unit, f"FLOPs of one example ({letter})")}
    if all(row["allocated"] is not None for row in rows):
        wanted["allocated"] = (MIB, f"peak allocated on {data['device']} (MiB)")
    figure = draw_panels(rows, wanted, data["experts"])
    first, last = rows[0], rows[-1]
    see = (
        f"Precomposed, the model costs the same for every E: {last['memory_precomposed'] / MIB:.3g} MiB and "
        f"{last['flops_precomposed'] / unit:.3g} {letter}FLOPs. Composed in every forward, from E={first['experts']} "
        f"to E={last['experts']} memory grows from {first['memory'] / MIB:.3g} to {last['memory'] / MIB:.3g} MiB and "
        f"FLOPs from {first['flops'] / unit:.3g} to {last['flops'] / unit:.3g} {letter}. Grey line: this run's E. "
        "With few bases the composed blocks take more memory than the bases."
    )
    how = (
        "The run's model is rebuilt for every E and run on one example, without gradients. Memory: peak bytes of all "
        "live tensors, including parameters. FLOPs: 2 × multiply-adds of matrix products, without attention's score "
        "and value products."
    )
    if data["too_large"]:
        how += f" Left out, because too large for this machine: E={', '.join(map(str, data['too_large']))}."
    return [Picture("cost", "Cost of inference against the number of expert bases", see, how, figure)]


def draw_sweep(rows: Sequence[Data], title: str) -> Picture:
    """The picture of ``intbmoe cost --sweep experts``: one of the paper's models, with the paper's figures."""
    figure = draw_panels(rows, {"memory": (MIB, "peak memory (MiB)"), "flops": (1e9, "FLOPs of one sample (G)")})
    figure.suptitle(title, fontsize=PHONE_POINTS + 1, x=0.01, ha="left")
    see = "Precomposed, the model costs the same for every E; composed in every forward, its cost grows with E."
    how = "IntBMoE is rebuilt for every E and run on one sample, without gradients; rings are the paper's figures."
    return Picture("cost-experts", title, see, how, figure)


def draw_panels(rows: Sequence[Data], wanted: Mapping[str, tuple[float, str]], own: int | None = None) -> Figure:
    """Draw a panel for each ``wanted`` column, with its unit and title; rings mark the paper's figures."""
    experts = [row["experts"] for row in rows]
    figure, panels = make_panels(len(wanted), PHONE_INCHES / 2, 3.0)
    for axes, (name, (divisor, title)) in zip(panels, wanted.items(), strict=True):
        if own is not None:
            axes.axvline(own, color=PALE, linewidth=4, zorder=0)
        for suffix, (label, colour, line, marker) in FORMS.items():
            values = [row[name + suffix] / divisor for row in rows]
            axes.plot(experts, values, color=colour, linestyle=line, marker=marker, markersize=4, label=label)
            papers = [(row["experts"], row.get("paper", {})) for row in rows]
            printed = [(count, paper[name + suffix]) for count, paper in papers if name + suffix in paper]
            if printed:
                ring = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "linestyle": "", "zorder": 3}
                ring["clip_on"] = False  # the largest value is at the edge
                axes.plot(*zip(*printed, strict=True), color=colour, label="the paper's", **ring)
        axes.set_xscale("log", base=2)
        axes.set_xticks(experts, [str(count) for count in experts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        tidy(axes, title, "expert bases E", grid="y")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=2, frameon=False, fontsize=PHONE_POINTS)
    return figure
