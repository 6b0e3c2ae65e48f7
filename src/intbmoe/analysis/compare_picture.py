"""The picture of a comparison: how good, and at what cost, one line a variant, the best on top."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from intbmoe.analysis.compare import Summary
from intbmoe.registry import find_method

# Okabe and Ito's colours, told apart also by those who see fewer; the marker says the same again.
OWN, FULL, SPARSE, PLAIN = "IntBMoE", "all experts take part", "few experts take part", "no experts"
STYLES = {OWN: ("#d55e00", "*"), FULL: ("#0072b2", "s"), SPARSE: ("#e69f00", "o"), PLAIN: ("#777777", "D")}
GRID = "#dddddd"


def draw(summaries: Sequence[Summary], title: str, path: Path) -> Path:
    """Save the picture: the metric with its interval on the left, FLOPs and parameters on the right."""
    better = 1 if _higher_is_better(summaries) else -1
    rows = sorted((row for row in summaries if row.mean is not None), key=lambda row: better * row.mean)
    figure = Figure(figsize=(11, 1.4 + 0.34 * len(rows)), layout="constrained")
    metric, flops, params = figure.subplots(1, 3, sharey=True, width_ratios=(2.2, 1, 1))
    factor, percent = (100, " (%)") if rows[0].metric.startswith("accuracy") else (1, "")
    span = _draw_metric(metric, rows, factor)
    metric.set_xlim(*span)
    metric.set_title(f"{rows[0].metric}{percent}", loc="left", fontsize=11)
    billions = max(row.counts.flops for row in rows) >= 1e9
    unit, letter = (1e9, "G") if billions else (1e6, "M")
    _draw_cost(flops, rows, "flops", unit, letter, "FLOPs of one example")
    _draw_precomposed(flops, rows, summaries, unit)
    _draw_cost(params, rows, "params", 1e6, "M", "parameters")
    metric.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=10)
    for label, row in zip(metric.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.label == "intbmoe" else "normal")
    metric.set_ylim(-0.6, len(rows) - 0.4)
    families = [family for family in STYLES if any(_family(row) == family for row in rows)]
    handles = [
        Line2D([], [], color=STYLES[family][0], marker=STYLES[family][1], linestyle="", markersize=8, label=family)
        for family in families
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    return path


def _higher_is_better(summaries: Sequence[Summary]) -> bool:
    return next(row for row in summaries if row.results).results[0]["higher_is_better"]


def _family(row: Summary) -> str:
    if row.method == "intbmoe":
        return OWN
    if row.method in ("dense", "swiglu"):
        return PLAIN
    return FULL if find_method(row.method).participation == "dense" else SPARSE


def _draw_metric(axes, rows: Sequence[Summary], factor: float) -> tuple[float, float]:
    """Dots, not bars, because the axis does not begin at zero; returns its ends."""
    low = min((row.mean - (row.interval or 0)) * factor for row in rows)
    high = max((row.mean + (row.interval or 0)) * factor for row in rows)
    reach = high - low or 0.1 * abs(high) or 1
    start = low - 0.08 * reach
    for place, row in enumerate(rows):
        colour, marker = STYLES[_family(row)]
        mean, interval = row.mean * factor, (row.interval or 0) * factor
        axes.plot([start, mean], [place, place], color=GRID, linewidth=1, zorder=1)
        if interval:
            axes.plot([mean - interval, mean + interval], [place, place], color=colour, linewidth=2, alpha=0.6)
        axes.plot(mean, place, color=colour, marker=marker, markersize=12 if marker == "*" else 7, zorder=3)
        text = f"{mean:.2f}" if factor == 100 else f"{mean:.4f}"
        axes.annotate(text, (mean + interval, place), (9, 0), textcoords="offset points", va="center", fontsize=9)
    _tidy(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    return start, high + 0.2 * reach  # room for the last number


def _draw_cost(axes, rows: Sequence[Summary], column: str, unit: float, letter: str, title: str) -> None:
    values = [getattr(row.counts, column) / unit for row in rows]
    colours = [STYLES[_family(row)][0] for row in rows]
    bars = axes.barh(range(len(rows)), values, height=0.6, color=colours, alpha=0.85)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=9)
    axes.set_xlim(0, max(values) * 1.2)
    axes.set_title(f"{title} ({letter})", loc="left", fontsize=11)
    axes.set_xticks([])
    _tidy(axes)


def _draw_precomposed(axes, rows: Sequence[Summary], summaries: Sequence[Summary], unit: float) -> None:
    """The part of IntBMoE's FLOPs that stays when its blocks are composed beforehand."""
    for row in summaries:
        if row.mean is None:
            place = next(place for place, trained in enumerate(rows) if trained.label == row.label)
            value = row.counts.flops / unit
            axes.barh(place, value, height=0.6, color="none", edgecolor="white", hatch="////", linewidth=0)
            axes.annotate(
                f"{value:.3g} precomposed", (0, place - 0.3), (1, -1), textcoords="offset points", va="top", fontsize=7
            )


def _tidy(axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
