"""Draws how far IntBMoE is ahead of other methods while they train on text, for different lengths and warm-ups.

    python -m benchmarks.study.lead                       # docs/images/study/lead.svg, if there are runs

A point is a difference of training losses, each the mean of the last steps before it, averaged over the seeds that both
methods have. Runs with the same seed see the same examples in the same order, so such differences vary little; where
two data sets of slightly different size were used, the order differs, and so the lines are jagged.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from benchmarks.study.plan import RESULTS, read_summaries
from benchmarks.study.rows import Rows, Runs, find_rows, warm_up_steps
from benchmarks.study.studies import ONE_LAYER
from matplotlib.axes import Axes

from intbmoe.recipes.sets import PLACED
from intbmoe.report.canvas import Picture, make_panels, save_picture, tidy
from intbmoe.report.style import BLUE, GREEN, INK, ORANGE, PHONE_INCHES, PHONE_POINTS, PINK, SKY

OUTPUT = Path(__file__).parents[2] / "docs" / "images" / "study" / "lead.svg"
STUDIES = ("wikipedia", "wikipedia-warmup", "wikipedia-long-warmup", "wikipedia-whole")
STYLES = {
    PLACED: (INK, "-"),
    "swiglu-wide": (BLUE, "--"),
    "deepseek": (GREEN, "-."),
    ONE_LAYER: (PINK, ":"),
    "vmoe-more": (SKY, "-"),
}
"""Colour and dashes of each method."""
SHOWN = -0.12, 0.4
"""Nats. Losses of the first steps differ more, but say nothing."""

Lead = list[tuple[int, float]]  # steps, and nats by which IntBMoE's loss is lower


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw IntBMoE's lead during training from the study's summaries.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    summaries = read_summaries(options.results)
    found = {study: find_rows(study, summaries)[0] for study in STUDIES}
    save_picture(draw({study: rows for study, rows in found.items() if "intbmoe" in rows}), options.output)


def lead(runs: Runs, ours: Runs) -> Lead:
    """Returns how far ``ours`` are ahead of ``runs`` at the steps that the curves of all common seeds have."""
    curves = [{run["seed"]: dict(map(tuple, run["curve"])) for run in each} for each in (runs, ours)]
    pairs = [(curves[0][seed], curves[1][seed]) for seed in curves[0].keys() & curves[1].keys()]
    steps = set.intersection(*(curve.keys() & other.keys() for curve, other in pairs)) if pairs else ()
    return [(step, fmean(curve[step] - other[step] for curve, other in pairs)) for step in sorted(steps)]


def draw(found: Mapping[str, Rows]) -> Picture:
    figure, grid = make_panels(len(found), PHONE_INCHES / 2, 2.6, "IntBMoE is ahead by, nats")
    for axes, rows in zip(grid, found.values(), strict=True):
        _draw_panel(axes, rows)
    handles = {line.get_label(): line for axes in grid for line in axes.get_lines() if line.get_label()[0] != "_"}
    figure.legend(
        handles=list(handles.values()), loc="outside lower center", ncols=2, frameon=False, fontsize=PHONE_POINTS - 1
    )
    see = "Above the line IntBMoE's training loss is lower than the method's, below it is higher."
    how = "Training losses at the same steps of runs with the same seeds; jagged lines: the batches differ."
    return Picture("lead", "IntBMoE's lead during training on text", see, how, figure)


def _draw_panel(axes: Axes, rows: Rows) -> None:
    ours = rows["intbmoe"]
    axes.axhline(0, color=ORANGE, linewidth=1.5)
    for label, (colour, dashes) in STYLES.items():
        if points := lead(rows.get(label, []), ours):
            axes.plot(*zip(*points, strict=True), color=colour, ls=dashes, lw=1.6, label=rows[label][0]["title"])
    tidy(axes, f"{ours[0]['steps']:,} steps, {warm_up_steps(ours[0]):,} of warm-up", grid="y")
    axes.set_ylim(*SHOWN)
    axes.set_xlim(0, ours[0]["steps"])
    axes.set_xticks([0, ours[0]["steps"] // 2, ours[0]["steps"]])
    axes.tick_params(labelsize=PHONE_POINTS - 2)


if __name__ == "__main__":
    main()
