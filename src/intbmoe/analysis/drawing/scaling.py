"""Bytes that a device sends per step, against the experts, the tokens and the devices."""

from dataclasses import replace

from matplotlib.figure import Figure

from intbmoe.analysis.scaling import Counted, sent_bytes
from intbmoe.report.canvas import Picture, tidy
from intbmoe.report.style import BLUE, GREEN, GREY, ORANGE, PHONE_INCHES, PHONE_POINTS
from intbmoe.tasks.recipe import Recipe

LINES = {
    "ddp": (GREY, ":", "ddp"),
    "fsdp": (BLUE, "--", "fsdp"),
    "pools": (ORANGE, "-", "pools"),
    "experts": (GREEN, "-.", "experts (sparse methods)"),
}


def draw_scaling(counted: Counted, recipe: Recipe, devices: int) -> Picture:
    figure = Figure(figsize=(PHONE_INCHES, 7.6), layout="constrained")
    panels = figure.subplots(3, 1, sharey=True)
    powers = [2**n for n in range(1, 11)]
    tokens = [2**n for n in range(8, 21)]
    for scheme in counted.compared:
        colour, style, label = LINES[scheme]
        by_experts = [sent_bytes(counted.with_experts(e), scheme, devices) for e in powers]
        by_tokens = [sent_bytes(counted, scheme, devices, tokens=t) for t in tokens]
        by_devices = [sent_bytes(replace(counted, batch=max(counted.batch, n)), scheme, n) for n in powers]
        sweeps = zip(panels, (powers, tokens, powers), (by_experts, by_tokens, by_devices), strict=True)
        for axes, x, values in sweeps:
            axes.plot(x, [value / 1e9 for value in values], color=colour, linestyle=style, label=label, linewidth=2)
    marks = (counted.pools[0].experts if counted.pools else None, _tokens(counted, devices), devices)
    titles = (f"Expert bases E ({devices} devices)", "Tokens a device has in a step", "Devices")
    for axes, mark, title in zip(panels, marks, titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        tidy(axes, grid="both", size=PHONE_POINTS - 1)
        axes.set_title(title, loc="left", fontsize=PHONE_POINTS)
        if mark is not None:
            axes.axvline(mark, color=GREY, linewidth=0.8)
    panels[1].set_ylabel("GB that a device sends in a step", fontsize=PHONE_POINTS)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False, fontsize=PHONE_POINTS)
    return Picture(
        "scaling",
        f"What a device sends per step: {recipe.name}",
        "The amount that pools sends grows neither with the experts nor with the tokens.",
        "Counted from the recipe's model; the thin lines are the recipe's own numbers. Weights are sent in float32, "
        "composed blocks and tokens in the compute type.",
        figure,
    )


def _tokens(counted: Counted, devices: int) -> float:
    return counted.batch / devices * counted.tokens
