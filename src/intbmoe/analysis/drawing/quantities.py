"""The three quantities of all methods: one row for equal methods, one panel per quantity, readable on a phone."""

import textwrap
from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from intbmoe.analysis.quantities import BATCH, TOKENS, MethodQuantities
from intbmoe.report.canvas import Picture, add_legend, tidy
from intbmoe.report.style import FAMILIES, PHONE_INCHES, PHONE_POINTS

NONE = 0.2
"""The position of 0 on a logarithmic axis."""
LETTERS = 21  # most letters per line of names


def draw_quantities(rows: Sequence[MethodQuantities]) -> Picture:
    """Draw IntBMoE on top, then the other families; within a family, methods by execution."""
    groups = [list(group) for _, group in groupby(sorted(rows, key=_order), key=_order)]
    names = [_names(group) for group in groups]
    heights = [0.55 + 0.45 * (name.count("\n") + 1) for name in names]
    places = [-sum(heights[:number]) - height / 2 for number, height in enumerate(heights)]
    figure = Figure(figsize=(PHONE_INCHES, 1.5 + 0.36 * sum(heights)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1.9))
    for place, (row, *_) in zip(places, groups, strict=True):
        about = "~" if row.decided_by_router else ""
        for axes, value in zip(panels, (row.participation, row.execution), strict=False):
            _dot(axes, place, row, value, f"{about}{value:.2g}")
        _draw_sets(panels[2], place, row)
    titles = (
        "Participation\nexperts that\ncontribute\nto a token",
        "Execution\nexperts or\nblocks run\nfor a token",
        f"Materialization\nweight sets built\nfor one image of {TOKENS}\ntokens ─ for {BATCH} images",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xscale("log", base=2 if axes is not panels[2] else 10)
        tidy(axes, grid="x", size=PHONE_POINTS - 1)
        axes.set_title(title, loc="left", fontsize=PHONE_POINTS)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.minorticks_off()
    for axes in panels[:2]:
        axes.set_xlim(0.7, 90)
        axes.set_xticks([1, 4, 16], ["1", "4", "16"])
    panels[2].set_xlim(NONE / 2, 50_000)
    panels[2].set_xticks([NONE, 1, 100, 10_000], ["0", "1", "100", "10,000"])
    panels[0].set_yticks(places, names, fontsize=PHONE_POINTS)
    panels[0].get_yticklabels()[0].set_fontweight("bold")
    panels[0].set_ylim(-sum(heights), 0)
    add_legend(figure, {row.family for row in rows}, PHONE_POINTS)
    return Picture(
        "quantities",
        "Participation, execution and materialization",
        "If few experts run, few contribute. Merging runs one, but builds a weight set per example, segment or token. "
        "In IntBMoE all experts contribute, few blocks run and a fixed number is built, whatever the input.",
        "At the paper's budget on images (E = 16, so 17 experts if none is shared), by each method's definition; "
        "~: a trained router decides, the number is that of the cost table.",
        figure,
    )


def _names(rows: Sequence[MethodQuantities]) -> str:
    """The names, separated by commas and wrapped between names."""
    joined = ", ".join(row.title.replace(" ", "\N{NO-BREAK SPACE}") for row in rows)
    return textwrap.fill(joined, LETTERS, break_long_words=False, break_on_hyphens=False)


def _order(row: MethodQuantities) -> tuple[float | bool, ...]:
    """Order by family, then from few to many; equal methods have the same key."""
    family = list(FAMILIES).index(row.family)
    return family, row.execution, row.participation, row.sets_of_one, row.sets_of_batch, row.decided_by_router


def _dot(axes: Axes, place: float, row: MethodQuantities, value: float, text: str, filled: bool = True) -> None:
    colour, marker = FAMILIES[row.family]
    face = colour if filled else "none"
    size = 13 if marker == "*" else 7
    axes.plot(value, place, color=colour, marker=marker, markersize=size, markerfacecolor=face, zorder=3)
    axes.annotate(text, (value, place), (8, 0), textcoords="offset points", va="center", fontsize=PHONE_POINTS)


def _draw_sets(axes: Axes, place: float, row: MethodQuantities) -> None:
    one, batch = row.sets_of_one, row.sets_of_batch
    if one == batch:
        _dot(axes, place, row, one or NONE, f"{one:,}", filled=one > 0)
        return
    axes.plot([one, batch], [place, place], color=FAMILIES[row.family][0], linewidth=2, zorder=2)
    for value in (one, batch):
        _dot(axes, place, row, value, "")
    # Above the line, because there may be no room beside it.
    middle, words = (one * batch) ** 0.5, row.materialization.removeprefix("1 ")
    look = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": PHONE_POINTS - 1}
    axes.annotate(words, (middle, place), (0, 4), **look)
