"""Common to all pictures: the picture itself, panels, axes and legends. Colours are in ``style.py``.

Pictures with panels are as wide as a phone can show, with letters readable there; more panels make them taller.
"""

import io
import math
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
from intbmoe.report.style import BLOCKS, DIVERGING, FAMILIES, GRID, NOTHING, PHONE_INCHES, PHONE_POINTS
from intbmoe.report.svg import for_pages

SHADES = (0.0, -0.45, 0.5)  # variants of the blocks' colours if there are more blocks: plain, darker, lighter
FORMATS = ("png", "svg")
DPI = 150  # of a PNG, and of the pixel images inside an SVG
LOAD_TITLES = {
    "utilisation": "utilisation (1: all get tokens)",
    "entropy": "entropy of the load (1: even)",
    "worst_case": "largest load / mean load (1: even)",
    "dropped": "share of assignments dropped",
}
"""Titles of panels that show a load over training."""
LETTER_INCHES = 0.088  # width of a digit of PHONE_POINTS - 1, in matplotlib's typeface

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A figure and its caption."""

    name: str  # of its files, without the extension
    title: str
    see: str  # what to see
    how: str  # how it was computed
    figure: Figure

    def caption(self) -> dict[str, str]:
        return {"title": self.title, "see": self.see, "how": self.how}

    def content(self, form: str) -> bytes:
        """The bytes of a PNG or SVG, always the same for the same figure; an SVG also has colours for dark screens."""
        buffer = io.BytesIO()
        if form != "svg":
            self.figure.savefig(buffer, format=form, dpi=DPI)
            return buffer.getvalue()
        # Without a fixed salt, or with a date, no two SVG files would be equal.
        with matplotlib.rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none"}):
            self.figure.savefig(buffer, format=form, dpi=DPI, metadata={"Date": None})
        return for_pages(buffer.getvalue().decode()).encode()


def require_format(path: Path) -> str:
    """The format of a picture from its path's extension, which must be one of ``FORMATS``."""
    form = path.suffix.removeprefix(".")
    if form not in FORMATS:
        raise ValueError(f"{path}: a picture must end in {' or '.join(f'.{known}' for known in FORMATS)}")
    return form


def save_picture(picture: Picture, path: Path) -> None:
    """Save a picture as PNG or SVG, by the extension of ``path``."""
    content = picture.content(require_format(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def save_pictures(pictures: Iterable[Picture], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for picture in pictures:
        for form in FORMATS:
            (folder / f"{picture.name}.{form}").write_bytes(picture.content(form))
        (folder / f"{picture.name}.json").write_bytes(to_json(picture.caption()))


def add_legend(figure: Figure, families: Container[str], size: float = 9) -> None:
    """Add a legend of the figure's ``families`` below it, in two columns if four would be too wide."""
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", markersize=8, label=name)
        for name, (colour, marker) in FAMILIES.items()
        if name in families
    ]
    columns = 4 if figure.get_size_inches()[0] > 8 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=size)


def shorten(label: str, letters: int) -> str:
    """Cut a row's label to at most ``letters`` letters, so that the row keeps its space."""
    return label if len(label) <= letters else f"{label[: letters - 1]}…"


def layer_title(name: str) -> str:
    """ "layer 2" for "blocks.2.moe"; the last part of the name if it has no number."""
    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return f"layer {numbers[-1]}" if numbers else parts[-1]


def make_panels(
    number: int, width: float, height: float, ylabel: str = "", labels: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Make ``number`` axes, as many side by side as fit on a phone if row labels take ``labels``.

    Sizes are in inches. Axes with a common ``ylabel`` share their scale.
    """
    columns = max(1, min(number, int((PHONE_INCHES - labels) // width)))
    rows = -(-number // columns)
    columns = -(-number // rows)  # five panels are three and two, not four and one
    figure = Figure(figsize=(PHONE_INCHES, rows * height + 0.2), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.06, hspace=0.03)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=bool(ylabel)).flatten()
    for axes in grid[::columns]:
        axes.set_ylabel(ylabel, fontsize=PHONE_POINTS)
    for axes in grid[number:]:
        axes.set_visible(False)
    return figure, list(grid[:number])


def bars_width(bars: int) -> float:
    """The width of a panel in inches: two in a row if their bars are wide enough."""
    return PHONE_INCHES / (2 if bars <= 16 else 1)


def rows_height(rows: int) -> float:
    """The height of a heat map in inches: up to 16 rows have full height, further rows are lower."""
    return 0.15 * min(rows, 16) + 0.04 * max(0, rows - 16)


def heat_map(axes: Axes, values: np.ndarray, limit: float, title: str) -> Any:
    """Draw a heat map with symmetric colours, so that white is 0; grey means no value."""
    axes.set_facecolor(NOTHING)
    # Without interpolation an SVG holds one pixel per value, and browsers draw the pixels with sharp edges.
    look = {"cmap": DIVERGING, "vmin": -limit, "vmax": limit, "aspect": "auto", "interpolation": "none"}
    image = axes.imshow(np.ma.masked_invalid(values), **look)
    axes.set_title(title, loc="left", fontsize=PHONE_POINTS)
    axes.tick_params(length=0, labelsize=PHONE_POINTS - 1)
    axes.spines[:].set_visible(False)
    return image


def number_columns(axes: Axes, numbers: Sequence[int], unit: str, width: float) -> None:
    """Label columns that are ``width`` inches wide with all numbers, or as many as there is room for."""
    letters = max(len(str(number)) for number in numbers)
    step = math.ceil((letters * LETTER_INCHES + 0.05) / width)
    axes.set_xticks(range(0, len(numbers), step), [str(number) for number in numbers[::step]])
    axes.tick_params(axis="x", labelsize=PHONE_POINTS - 1)
    axes.set_xlabel(unit, fontsize=PHONE_POINTS)


def colour_bar(figure: Figure, image: Any, panels: Any, title: str) -> None:
    """Add a colour bar below the panels, of the same thickness and distance whatever the picture's height."""
    pad = 0.1 / figure.get_size_inches()[1]
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.9, aspect=30, pad=pad)
    bar.set_label(title, fontsize=PHONE_POINTS)
    bar.ax.tick_params(labelsize=PHONE_POINTS - 1)
    bar.outline.set_visible(False)


def tidy(
    axes: Axes, title: str = "", xlabel: str = "", *, ticks: int = 0, grid: Any = None, size: float = PHONE_POINTS - 1
) -> None:
    """Remove the box; set the font size, at most ``ticks`` integer ticks on the x axis and a ``grid`` (x, y, both)."""
    if title:
        axes.set_title(title, loc="left", fontsize=size + 1)
    if xlabel:
        axes.set_xlabel(xlabel, fontsize=size + 1)
    if ticks:
        axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=size)
    axes.set_axisbelow(True)


def block_colours(number: int) -> list[tuple[float, float, float]]:
    """A colour for each of ``number`` blocks or experts: eight easily distinguished ones, then darker, then lighter."""
    base = [np.array(to_rgb(colour)) for colour in BLOCKS]
    if number > len(SHADES) * len(base):
        return [tuple(colour[:3]) for colour in matplotlib.colormaps["viridis"](np.linspace(0, 1, number))]
    shaded = [shade(base[place % len(base)], SHADES[place // len(base)]) for place in range(number)]
    return [tuple(float(part) for part in colour) for colour in shaded]


def shade(colour: Sequence[float], amount: float) -> np.ndarray:
    """A colour mixed with white (amount above 0) or black (below)."""
    colour = np.asarray(colour, dtype=float)
    return colour + (1 - colour) * amount if amount >= 0 else colour * (1 + amount)
