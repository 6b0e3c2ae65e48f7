"""The three quantities of all methods: a row per method, a panel per quantity."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from intbmoe.analysis.quantities import BATCH, TOKENS, MethodQuantities
from intbmoe.report.canvas import FAMILIES, FORMATS, Picture, add_legend, tidy
from intbmoe.report.images import adapt_svg

NONE = 0.3
"""Where a logarithmic axis shows 0."""


def draw_quantities(rows: Sequence[MethodQuantities]) -> Picture:
    """IntBMoE on top, then the other families; within one, methods by what they run."""
    order = list(FAMILIES)
    rows = sorted(rows, key=lambda row: (order.index(row.family), row.execution, row.participation), reverse=True)
    figure = Figure(figsize=(11.5, 1.6 + 0.33 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1.6))
    for place, row in enumerate(rows):
        about = "~" if row.decided_by_router else ""
        for axes, value in zip(panels, (row.participation, row.execution), strict=False):
            _dot(axes, place, row, value, f"{about}{value:g}")
        _draw_sets(panels[2], place, row)
    titles = (
        "Participation: experts that\ncontribute to a token's output",
        "Execution: experts or blocks\ncomputed for a token",
        f"Materialization: weight sets built from experts,\nfor one image of {TOKENS} tokens ─ for {BATCH} images",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xscale("log", base=2 if axes is not panels[2] else 10)
        tidy(axes, title, grid="x")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.minorticks_off()
    for axes in panels[:2]:
        axes.set_xlim(0.8, 34)
        axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    panels[2].set_xlim(NONE / 1.6, 2_000_000)
    panels[2].set_xticks([NONE, 1, 10, 100, 1000, 10_000], ["0", "1", "10", "100", "1,000", "10,000"])
    panels[0].set_yticks(range(len(rows)), [row.title for row in rows], fontsize=9)
    for label, row in zip(panels[0].get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.family == order[0] else "normal")
    panels[0].set_ylim(-0.7, len(rows) - 0.3)
    add_legend(figure, {row.family for row in rows})
    return Picture(
        "quantities",
        "Participation, execution and materialization",
        "Few experts contribute where few are run. Merging runs one, but builds a weight set per example, segment or "
        "token. IntBMoE has all contribute, runs few blocks and builds a fixed number, whatever the input.",
        "At the paper's budget on images (E = 16, so 17 experts where none is shared), by each method's definition; "
        "~: a trained router decides, the number is the cost table's.",
        figure,
    )


def _dot(axes: Axes, place: int, row: MethodQuantities, value: float, text: str, filled: bool = True) -> None:
    colour, marker = FAMILIES[row.family]
    face = colour if filled else "none"
    size = 11 if marker == "*" else 6
    axes.plot(value, place, color=colour, marker=marker, markersize=size, markerfacecolor=face, zorder=3)
    axes.annotate(text, (value, place), (8, 0), textcoords="offset points", va="center", fontsize=8)


def _draw_sets(axes: Axes, place: int, row: MethodQuantities) -> None:
    one, batch = row.sets_of_one, row.sets_of_batch
    if one == batch:
        _dot(axes, place, row, one or NONE, f"{one:,}", filled=one > 0)
        return
    _dot(axes, place, row, one, "")
    axes.plot([one, batch], [place, place], color=FAMILIES[row.family][0], linewidth=2, zorder=2)
    _dot(axes, place, row, batch, f"{row.materialization}: {one:,} ─ {batch:,}")


def save_picture(picture: Picture, path: Path) -> None:
    """As PNG or SVG, by the ending of ``path``; an SVG has colours for dark screens too."""
    form = path.suffix.removeprefix(".")
    if form not in FORMATS:
        raise ValueError(f"{path}: a picture must end in {' or '.join(f'.{known}' for known in FORMATS)}")
    content = picture.content(form)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(adapt_svg(content.decode()).encode() if form == "svg" else content)
