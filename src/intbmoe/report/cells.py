"""Cells coloured by block: patches, tokens and visits look alike in all pictures of examples.

A cell has the colour of the block with the largest weight and, where there is a second one, a strip of its colour at
the lower edge. A cell that no block computes is hatched.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from intbmoe.report.canvas import layer_title, shade

LEGEND_INCHES = 0.85  # width of one entry
Colours = Sequence[tuple[float, float, float]]


class Cell(NamedTuple):
    """A rectangle whose y grows downwards, and the blocks it stands for, the heaviest first."""

    x: float
    y: float
    width: float
    height: float
    ids: Sequence[int]


def draw_cells(
    axes: Axes, cells: Sequence[Cell], colours: Colours, pale: float = 0.0, alpha: float = 1.0, strip: float = 0.22
) -> None:
    """Fill the cells; ``pale`` mixes the large areas with white, so that text on them can be read.

    ``strip`` is the height of the second choice's strip, of the cell's.
    """
    chosen = [cell for cell in cells if cell.ids]
    twice = [cell for cell in chosen if len(cell.ids) > 1]
    _fill(axes, [_whole(cell) for cell in chosen], [shade(colours[cell.ids[0]], pale) for cell in chosen], alpha)
    _fill(axes, [_strip(cell, strip) for cell in twice], [colours[cell.ids[1]] for cell in twice], 1.0)
    for cell in cells:
        if not cell.ids:
            axes.add_patch(_whole(cell, facecolor="white", edgecolor="#555555", hatch="xxx", linewidth=0, alpha=0.8))


def _fill(axes: Axes, rectangles: list[Rectangle], colours: list, alpha: float) -> None:
    if rectangles:
        axes.add_collection(
            PatchCollection(rectangles, facecolors=colours, edgecolors="white", linewidths=0.4, alpha=alpha)
        )


def _whole(cell: Cell, **look: object) -> Rectangle:
    return Rectangle((cell.x, cell.y), cell.width, cell.height, **look)


def _strip(cell: Cell, share: float) -> Rectangle:
    return Rectangle((cell.x, cell.y + (1 - share) * cell.height), cell.width, share * cell.height)


def add_inches(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Bare axes at a place in inches from the upper left corner."""
    wide, high = figure.get_size_inches()
    axes = figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))
    axes.set_axis_off()
    return axes


def add_legend(figure: Figure, used: Sequence[int], colours: Colours, unit: str) -> None:
    """Which colour is which block, along the lower edge."""
    handles = [Patch(facecolor=colours[number], label=f"{unit} {number}") for number in used]
    columns = _legend_columns(len(handles), figure.get_size_inches()[0])
    look = {"frameon": False, "fontsize": 7, "handlelength": 1.2, "columnspacing": 1.2, "borderaxespad": 0.2}
    figure.legend(handles=handles, loc="lower center", ncols=columns, **look)


def legend_inches(used: Sequence[int], width: float) -> float:
    """The height that ``add_legend`` takes of a figure so wide."""
    return 0.12 + 0.16 * -(-len(used) // _legend_columns(len(used), width))


def _legend_columns(entries: int, width: float) -> int:
    return max(1, min(entries, int(width // LEGEND_INCHES)))


def title_of(layer: str) -> str:
    """A layer's title with a capital."""
    return layer_title(layer).capitalize()
