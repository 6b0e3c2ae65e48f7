"""Losses, metrics and mean loads over training."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from intbmoe.report.canvas import BLUE, GRID, LOAD_TITLES, ORANGE, Data, Picture, make_panels, tidy

TITLES = {**LOAD_TITLES, "untaken": "share of tokens without expert"}


def draw_training(data: Data) -> list[Picture]:
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
    loads = [name for name in TITLES if ("train", name) in curves]
    if loads:
        shown = [name for name in loads if name != "dropped" or any(curves["train", name]["values"])]
        ends = ", ".join(f"{name.replace('_', ' ')} {curves['train', name]['values'][-1]:.3g}" for name in loads)
        see = f"How evenly tokens were spread while training; flat lines near 1 are even. At the end: {ends}."
        how = "From metrics.jsonl: the loads since the line before, as means over the layers that choose."
        figure = _draw_curves("load", shown, curves)
        found.append(Picture("load-training", "Load over training", see, how, figure))
    return found


def _draw_curves(name: str, names: Sequence[str], curves: Mapping[tuple[str, str], Data]) -> Figure:
    figure, panels = make_panels(len(names), 3.4, 2.6)
    styles = {"train": (BLUE, "-", None, 4), "valid": (ORANGE, "--", "o", 4), "test": ("black", "", "*", 9)}
    for axes, wanted in zip(panels, names, strict=True):
        for split, (colour, line, marker, size) in styles.items():
            curve = curves.get((split, wanted))
            if curve:
                look = {"color": colour, "linestyle": line, "markersize": size, "label": split}
                look["marker"] = marker or ("o" if len(curve["steps"]) == 1 else None)
                axes.plot(curve["steps"], curve["values"], **look)
        axes.set_title(TITLES.get(wanted, wanted), loc="left", fontsize=9)
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        tidy(axes)
    if name == "training":
        panels[0].legend(fontsize=8, frameon=False)
    return figure
