"""What the pictures share: the picture itself, panels, axes, legends. Their colours are in ``style.py``.

Pictures of panels are as wide as a phone can show, with letters that can be read there; more panels make them taller.
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

SHADES = (0.0, -0.45, 0.5)  # of the blocks' colours, where there are more blocks: as they are, darker, lighter
FORMATS = ("png", "svg")
DPI = 150  # of a PNG, and of what an SVG holds as pixels
LOAD_TITLES = {
    "utilisation": "utilisation (1: all get tokens)",
    "entropy": "entropy of the load (1: even)",
    "worst_case": "largest load / mean load (1: even)",
    "dropped": "share of assignments dropped",
}
"""Of panels that show a load over training."""
LETTER_INCHES = 0.088  # width of a digit of PHONE_POINTS - 1, in matplotlib's typeface

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
        """The bytes of a PNG or SVG, the same for the same figure; an SVG has colours for dark screens too."""
        buffer = io.BytesIO()
        if form != "svg":
            self.figure.savefig(buffer, format=form, dpi=DPI)
            return buffer.getvalue()
        # Without a salt and with a date, no two SVG files would be equal.
        with matplotlib.rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none"}):
            self.figure.savefig(buffer, format=form, dpi=DPI, metadata={"Date": None})
        return for_pages(buffer.getvalue().decode()).encode()


def require_format(path: Path) -> str:
    """The format that a picture's path asks for by its ending, which must be one of ``FORMATS``."""
    form = path.suffix.removeprefix(".")
    if form not in FORMATS:
        raise ValueError(f"{path}: a picture must end in {' or '.join(f'.{known}' for known in FORMATS)}")
    return form


def save_picture(picture: Picture, path: Path) -> None:
    """As PNG or SVG, by the ending of ``path``."""
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
    """Below the figure: the ``families`` that are in it, in two columns where four would be wider than it."""
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", markersize=8, label=name)
        for name, (colour, marker) in FAMILIES.items()
        if name in families
    ]
    columns = 4 if figure.get_size_inches()[0] > 8 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=size)


def shorten(label: str, letters: int) -> str:
    """At most so many letters of a row's label, so that the row keeps its room."""
    return label if len(label) <= letters else f"{label[: letters - 1]}…"


def layer_title(name: str) -> str:
    """ "layer 2" of "blocks.2.moe"; a layer without number keeps its last name."""
    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return f"layer {numbers[-1]}" if numbers else parts[-1]


def make_panels(
    number: int, width: float, height: float, ylabel: str = "", labels: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """``number`` axes, as many beside each other as a phone's width has room for, where row labels take ``labels``.

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
    """Inches of a panel: two in a row while their bars are wide enough."""
    return PHONE_INCHES / (2 if bars <= 16 else 1)


def rows_height(rows: int) -> float:
    """Inches of a heat map: rows of one height while they are few, then lower ones."""
    return 0.15 * min(rows, 16) + 0.04 * max(0, rows - 16)


def heat_map(axes: Axes, values: np.ndarray, limit: float, title: str) -> Any:
    """Symmetric colours, so that white is 0; grey where there is nothing."""
    axes.set_facecolor(NOTHING)
    # Not interpolated at all, an SVG holds one pixel a value, and browsers draw them with sharp edges.
    look = {"cmap": DIVERGING, "vmin": -limit, "vmax": limit, "aspect": "auto", "interpolation": "none"}
    image = axes.imshow(np.ma.masked_invalid(values), **look)
    axes.set_title(title, loc="left", fontsize=PHONE_POINTS)
    axes.tick_params(length=0, labelsize=PHONE_POINTS - 1)
    axes.spines[:].set_visible(False)
    return image


def number_columns(axes: Axes, numbers: Sequence[int], unit: str, width: float) -> None:
    """Below columns that are ``width`` inches wide: all numbers, or as many as there is room for."""
    letters = max(len(str(number)) for number in numbers)
    step = math.ceil((letters * LETTER_INCHES + 0.05) / width)
    axes.set_xticks(range(0, len(numbers), step), [str(number) for number in numbers[::step]])
    axes.tick_params(axis="x", labelsize=PHONE_POINTS - 1)
    axes.set_xlabel(unit, fontsize=PHONE_POINTS)


def colour_bar(figure: Figure, image: Any, panels: Any, title: str) -> None:
    """Below the panels; as thick and as far from them in a tall picture as in a low one."""
    pad = 0.1 / figure.get_size_inches()[1]
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.9, aspect=30, pad=pad)
    bar.set_label(title, fontsize=PHONE_POINTS)
    bar.ax.tick_params(labelsize=PHONE_POINTS - 1)
    bar.outline.set_visible(False)


def tidy(
    axes: Axes, title: str = "", xlabel: str = "", *, ticks: int = 0, grid: Any = None, size: float = PHONE_POINTS - 1
) -> None:
    """No box, numbers of ``size`` points, at most ``ticks`` whole ones below, a ``grid`` of x, y or both behind."""
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
