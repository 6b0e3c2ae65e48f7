"""What the pictures share: the picture itself, panels, axes, legends. Their colours are in ``style.py``."""

import io
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from intbmoe.files import to_json
from intbmoe.report.style import BLOCKS, DIVERGING, FAMILIES, GRID, MONO, NOTHING, SANS

SHADES = (0.0, -0.45, 0.5)  # of the blocks' colours, where there are more blocks: as they are, darker, lighter
FORMATS = ("png", "svg")
LOAD_TITLES = {
    "utilisation": "utilisation (1: all get tokens)",
    "entropy": "entropy of the load (1: even)",
    "worst_case": "largest load / mean load (1: even)",
    "dropped": "share of assignments dropped",
}
"""Of panels that show a load over training."""

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A figure and what is to be said under it."""

    name: str  # of its files, without ending
    title: str
    see: str  # what to see
    how: str  # how it was computed
    figure: Figure

    def caption(self) -> dict[str, str]:
        return {"title": self.title, "see": self.see, "how": self.how}

    def content(self, form: str) -> bytes:
        """The bytes of a PNG or SVG, the same for the same figure."""
        buffer = io.BytesIO()
        if form != "svg":
            self.figure.savefig(buffer, format=form, dpi=150)
            return buffer.getvalue()
        # Without a salt and with a date, no two SVG files would be equal.
        with matplotlib.rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none"}):
            self.figure.savefig(buffer, format=form, metadata={"Date": None})
        return _with_typefaces(buffer.getvalue().decode()).encode()


def _with_typefaces(svg: str) -> str:
    """Letters stay letters, in the typefaces of the pages; they are narrower than matplotlib's, so everything fits."""
    svg = re.sub(r"font-family: 'DejaVu Sans Mono'[^;\"]*", f"font-family: {MONO}", svg)
    svg = re.sub(r"font-family: 'DejaVu Sans'[^;\"]*;? ?", "", svg)
    return svg.replace("<svg ", f'<svg font-family="{SANS}" ', 1)


def save_pictures(pictures: Iterable[Picture], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for picture in pictures:
        for form in FORMATS:
            (folder / f"{picture.name}.{form}").write_bytes(picture.content(form))
        (folder / f"{picture.name}.json").write_bytes(to_json(picture.caption()))


def add_legend(figure: Figure, families: Container[str], size: float = 9) -> None:
    """Below the figure: the ``families`` that are in it, in two columns where four would be wider than it."""
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", markersize=8, label=name)
        for name, (colour, marker) in FAMILIES.items()
        if name in families
    ]
    columns = 4 if figure.get_size_inches()[0] > 8 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=size)


def layer_title(name: str) -> str:
    """ "layer 2" of "blocks.2.moe"; a layer without number keeps its last name."""
    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return f"layer {numbers[-1]}" if numbers else parts[-1]


def make_panels(number: int, width: float, height: float, ylabel: str = "") -> tuple[Figure, list[Axes]]:
    """``number`` axes, at most about 14 inches beside each other; those with a common ``ylabel`` share their scale."""
    columns = max(1, min(number, int(14 // width)))
    rows = -(-number // columns)
    columns = -(-number // rows)  # five panels are three and two, not four and one
    figure = Figure(figsize=(max(4.5, columns * width + 1), rows * height + 0.2), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=bool(ylabel)).flatten()
    for axes in grid[::columns]:
        axes.set_ylabel(ylabel, fontsize=9)
    for axes in grid[number:]:
        axes.set_visible(False)
    return figure, list(grid[:number])


def bars_width(bars: int) -> float:
    """Inches of a panel: bars of one width while they are few, then narrower ones, three panels in a row."""
    return min(1.2 + 0.2 * bars, 4.6)


def heat_map(axes: Axes, values: np.ndarray, limit: float, title: str) -> Any:
    """Symmetric colours, so that white is 0; grey where there is nothing."""
    axes.set_facecolor(NOTHING)
    image = axes.imshow(
        np.ma.masked_invalid(values), cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
    )
    axes.set_title(title, loc="left", fontsize=9)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    return image


def number_columns(axes: Axes, numbers: Sequence[int], unit: str) -> None:
    step = -(-len(numbers) // 16)
    axes.set_xticks(range(0, len(numbers), step), [str(number) for number in numbers[::step]], fontsize=8)
    axes.set_xlabel(unit, fontsize=9)


def colour_bar(figure: Figure, image: Any, panels: Any, title: str) -> None:
    bar = figure.colorbar(image, ax=panels, shrink=0.9, aspect=25)
    bar.set_label(title, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def tidy(axes: Axes, title: str = "", xlabel: str = "", *, ticks: int = 0, grid: Any = None, size: float = 8) -> None:
    """No box, small numbers, at most ``ticks`` whole ones below, and behind the data a ``grid``: of x, y or both."""
    if title:
        axes.set_title(title, loc="left", fontsize=9)
    if xlabel:
        axes.set_xlabel(xlabel, fontsize=9)
    if ticks:
        axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=size)
    axes.set_axisbelow(True)


def block_colours(number: int) -> list[tuple[float, float, float]]:
    """A colour for each of ``number`` blocks or experts: eight that all can tell apart, then darker, then lighter."""
    base = [np.array(to_rgb(colour)) for colour in BLOCKS]
    if number > len(SHADES) * len(base):
        return [tuple(colour[:3]) for colour in matplotlib.colormaps["viridis"](np.linspace(0, 1, number))]
    shaded = [shade(base[place % len(base)], SHADES[place // len(base)]) for place in range(number)]
    return [tuple(float(part) for part in colour) for colour in shaded]


def shade(colour: Sequence[float], amount: float) -> np.ndarray:
    """A colour mixed with white (amount above 0) or black (below)."""
    colour = np.asarray(colour, dtype=float)
    return colour + (1 - colour) * amount if amount >= 0 else colour * (1 + amount)
