"""Single examples: which block each patch, token or visit went to, drawn on the image or the text itself.

Each token is a cell in the colour of its block with the largest weight, with a strip in the colour of the second block,
if any, at the lower edge. A cell that no block computes is hatched.
"""

import base64
import io
import math
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.image import imread
from matplotlib.patches import Patch, Rectangle

from intbmoe.report.canvas import Data, Picture, block_colours, layer_title, shade, shorten
from intbmoe.report.style import ON_COLOUR, PHONE_INCHES, PHONE_POINTS
from intbmoe.report.svg import KEPT
from intbmoe.tasks.serving.requests import spread_evenly

LETTER_WIDTH = 0.602  # relative to the font size, in DejaVu Sans Mono
LETTER = PHONE_POINTS * LETTER_WIDTH / 72  # width of a letter's cell in inches
LINE = int((PHONE_INCHES - 0.2) / LETTER)  # characters per line of text
MOST_LAYERS = 6  # most layers shown for texts and journeys; if there are more, evenly spread ones
NUMBERED = 2  # with at most so many patches per side, the blocks' numbers are written on them
TINT = 0.6
PALE = 0.35  # how much white is mixed into a colour below black text
LEGEND_INCHES = 1.15  # width of one entry
IMAGE_INCHES = 1.35  # largest width of an image
TITLE_LETTERS = 11  # most letters per line above an image
COLUMNS = {"scenario": 0, "intention": 1, "feedback": 2}
LABEL_LETTERS = 22  # most letters of a session's label
ROW, LABEL_LETTER = 0.21, 0.08  # inches: a session's row, and a letter of its label
_MIDDLE = {"ha": "center", "va": "center", "parse_math": False}
Colours = Sequence[tuple[float, float, float]]


def draw_examples(data: Data) -> list[Picture]:
    """Draw all images in one picture, and texts and journeys in one picture each."""
    if data["form"] == "image":
        return [_picture(data, "examples", data["examples"], _draw_images(data))]
    draw = _draw_text if data["form"] == "text" else _draw_visits
    numbered = enumerate(data["examples"], 1)
    return [_picture(data, f"example-{number}", [shown], draw(shown, data)) for number, shown in numbered]


def _picture(data: Data, name: str, examples: Sequence[Data], figure: Figure) -> Picture:
    unit, noun = data["unit"], {"image": "patch", "text": "token"}.get(data["form"], "visit's token")
    used = [
        f"{layer_title(layer['layer']).lower()}: {_mean_used(examples, place):.3g}"
        for place, layer in enumerate(examples[0]["layers"])
    ]
    lost = sum(not ids for shown in examples for layer in shown["layers"] for ids in layer["ids"])
    see = (
        f"Each {noun} has the colour of the {unit} with the largest weight, and below it a strip in the colour of the "
        f"second. If things that belong together have one colour, that {unit} has a job of its own; if no pattern is "
        f"visible, the router uses other features. Mean number of different {unit}s in first place per "
        f"example: {', '.join(used)}."
    )
    if lost:
        see += f" Hatched: no {unit} computed it ({lost} times)."
    if data["form"] != "image" and len(examples[0]["layers"]) > MOST_LAYERS:
        see += f" Shown are {MOST_LAYERS} of {len(examples[0]['layers'])} layers, evenly spread; the data has all."
    chosen = "the first of each class" if data["form"] == "image" else "evenly spread, not picked by hand"
    how = f"The router's choices in evaluation, after any capacity, on examples of the {data['split']} split: {chosen}."
    titles = {"image": "images", "text": "a text", "sessions": "one user's journeys", "items": "one user's history"}
    title = f"Where each {noun} went: {titles[data['form']]}"
    return Picture(name, title if data["form"] == "image" else f"{title} ({examples[0]['title']})", see, how, figure)


def _mean_used(examples: Sequence[Data], layer: int) -> float:
    return float(np.mean([len({ids[0] for ids in shown["layers"][layer]["ids"] if ids}) for shown in examples]))


def _used(examples: Sequence[Data]) -> list[int]:
    """The blocks that occur in first or second place."""
    return sorted({i for shown in examples for layer in shown["layers"] for ids in layer["ids"] for i in ids[:2]})


def _shown_layers(layers: Sequence[Data]) -> list[Data]:
    return [layers[place] for place in spread_evenly(len(layers), MOST_LAYERS)]


# Cells.


class Cell(NamedTuple):
    """A rectangle, with y growing downwards, and its blocks by descending weight."""

    x: float
    y: float
    width: float
    height: float
    ids: Sequence[int]


def draw_cells(
    axes: Axes, cells: Sequence[Cell], colours: Colours, pale: float = 0.0, alpha: float = 1.0, strip: float = 0.22
) -> None:
    """Fill the cells; ``pale`` mixes white into the large areas, so that text on them can be read.

    ``strip`` is the height of the second choice's strip, relative to the cell's.
    """
    chosen = [cell for cell in cells if cell.ids]
    whole = [Rectangle((cell.x, cell.y), cell.width, cell.height) for cell in chosen]
    _fill(axes, whole, [shade(colours[cell.ids[0]], pale) for cell in chosen], alpha)
    twice = [cell for cell in chosen if len(cell.ids) > 1]
    strips = [Rectangle((c.x, c.y + (1 - strip) * c.height), c.width, strip * c.height) for c in twice]
    _fill(axes, strips, [colours[cell.ids[1]] for cell in twice], 1.0)
    hatched = {"facecolor": "white", "edgecolor": ON_COLOUR, "hatch": "xxx", "linewidth": 0, "alpha": 0.8}
    for cell in cells:
        if not cell.ids:
            axes.add_patch(Rectangle((cell.x, cell.y), cell.width, cell.height, **hatched))


def _fill(axes: Axes, rectangles: list[Rectangle], colours: list, alpha: float) -> None:
    if rectangles:
        look = {"facecolors": colours, "edgecolors": "white", "linewidths": 0.4, "alpha": alpha}
        axes.add_collection(PatchCollection(rectangles, **look))


def add_inches(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes without decoration at a position in inches from the upper left corner."""
    wide, high = figure.get_size_inches()
    axes = figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))
    axes.set_axis_off()
    return axes


def add_legend(figure: Figure, used: Sequence[int], colours: Colours, unit: str, pixels: bool = False) -> None:
    """Add a legend of the blocks' colours at the lower edge; with ``pixels`` they stay the same on dark screens."""
    handles = [Patch(facecolor=colours[number], label=f"{unit} {number}") for number in used]
    columns = _legend_columns(len(handles), figure.get_size_inches()[0])
    handles = [handle for column in range(columns) for handle in handles[column::columns]]  # row by row, not by column
    look = {"frameon": False, "fontsize": PHONE_POINTS, "handlelength": 1.2, "columnspacing": 1.2}
    legend = figure.legend(handles=handles, loc="lower center", ncols=columns, borderaxespad=0.2, **look)
    if pixels:
        for handle in legend.legend_handles:
            handle.set_gid(f"{KEPT}-{handle.get_label()}")


def legend_inches(used: Sequence[int], width: float) -> float:
    """The height that ``add_legend`` needs in a figure of this width."""
    return 0.15 + 0.24 * -(-len(used) // _legend_columns(len(used), width))


def _legend_columns(entries: int, width: float) -> int:
    """As many columns as fit, chosen so that the lines are about equally long."""
    lines = -(-entries // max(1, int(width // LEGEND_INCHES)))
    return max(1, -(-entries // max(1, lines)))


# Images.


def _draw_images(data: Data) -> Figure:
    """A column for each image: the image itself, and below it the routing of each layer."""
    examples = data["examples"]
    layers = [layer["layer"] for layer in examples[0]["layers"]]
    colours, used = block_colours(data["choices"]), _used(examples)
    titles = [textwrap.fill(shown["title"], TITLE_LETTERS) for shown in examples]
    gap, left, top = 0.06, 0.28, 0.12 + 0.18 * max(title.count("\n") + 1 for title in titles)
    cell = min(IMAGE_INCHES, (PHONE_INCHES - left) / len(examples) - gap)
    height = top + (1 + len(layers)) * (cell + gap)
    figure = Figure(figsize=(PHONE_INCHES, height + legend_inches(used, PHONE_INCHES)))
    for column, shown in enumerate(examples):
        pixels = _grey(shown["image"])
        size, side = pixels.shape[0], math.isqrt(len(shown["kinds"]))
        for row, name in enumerate(["image", *layers]):
            axes = add_inches(figure, left + column * (cell + gap), top + row * (cell + gap), cell, cell)
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, extent=(0, size, size, 0), interpolation="none")
            if row:
                # The class token, if a mixture sees it, comes before the patches.
                _tint(axes, shown["layers"][row - 1]["ids"][-side * side :], side, size / side, colours)
            else:
                axes.set_title(titles[column], fontsize=PHONE_POINTS, pad=4, parse_math=False)
            axes.set_xlim(0, size)
            axes.set_ylim(size, 0)
            if column == 0:
                title = layer_title(name).capitalize() if row else "Image"
                look = {"transform": axes.transAxes, "fontsize": PHONE_POINTS, "rotation": 90, **_MIDDLE}
                axes.text(-0.17, 0.5, title, **look)
    add_legend(figure, used, colours, data["unit"], pixels=side > NUMBERED)
    return figure


def _grey(png: str) -> np.ndarray:
    """(H, W) in 0…1; grey, because colours are for the blocks."""
    pixels = imread(io.BytesIO(base64.b64decode(png)))
    return pixels if pixels.ndim == 2 else pixels[..., :3] @ np.array([0.299, 0.587, 0.114])


def _tint(axes, ids: Sequence[Sequence[int]], side: int, patch: float, colours) -> None:
    cells = [
        Cell(place % side * patch, place // side * patch, patch, patch, chosen) for place, chosen in enumerate(ids)
    ]
    draw_cells(axes, cells, colours, alpha=TINT, strip=0.14)
    if side > NUMBERED:
        for collection in axes.collections:
            collection.set_rasterized(True)  # as a thousand rectangles, an SVG would be twice as large
    else:
        for cell in cells:
            numbers = "·".join(map(str, cell.ids[:2]))
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.75, "linewidth": 0}
            where = (cell.x + cell.width / 2, cell.y + 0.4 * cell.height)
            axes.text(*where, numbers, fontsize=PHONE_POINTS - 1, color=ON_COLOUR, bbox=box, **_MIDDLE)


# Text.


def _draw_text(shown: Data, data: Data) -> Figure:
    layers, colours, used = _shown_layers(shown["layers"]), block_colours(data["choices"]), _used([shown])
    places, lines = lay_out(shown["texts"])
    line = 1.9 * LETTER
    panel = lines * line + 0.32
    height = len(layers) * panel + 0.1
    figure = Figure(figsize=(PHONE_INCHES, height + legend_inches(used, PHONE_INCHES)))
    for number, layer in enumerate(layers):
        axes = add_inches(figure, 0.1, number * panel + 0.27, LINE * LETTER, lines * line)
        axes.set_xlim(0, LINE)
        axes.set_ylim(lines, 0)
        axes.set_title(layer_title(layer["layer"]).capitalize(), loc="left", fontsize=PHONE_POINTS, pad=3)
        pieces = [(piece, ids) for of, ids in zip(places, layer["ids"], strict=True) for piece in of]
        draw_cells(axes, [Cell(x, y, len(text), 1, ids) for (x, y, text), ids in pieces], colours, pale=PALE)
        for (x, y, text), _ in pieces:
            look = {"fontsize": PHONE_POINTS, "family": "DejaVu Sans Mono", "va": "center", "parse_math": False}
            axes.text(x, y + 0.42, text, color=ON_COLOUR, **look)
    add_legend(figure, used, colours, data["unit"])
    return figure


def lay_out(texts: Sequence[str]) -> tuple[list[list[tuple[int, int, str]]], int]:
    """The pieces (x, y, letters) of each token on lines of ``LINE`` letters, and the number of lines.

    A line also ends at the text's own line breaks, which are shown as ↵; a token without text is a dot.
    """
    found, x, y = [], 0, 0
    for text in texts:
        pieces: list[tuple[int, int, str]] = []
        for letter in visible(text):
            if x == LINE:
                x, y = 0, y + 1
            if pieces and pieces[-1][1] == y:
                pieces[-1] = (pieces[-1][0], y, pieces[-1][2] + letter)
            else:
                pieces.append((x, y, letter))
            x += 1
            if letter == "↵":
                x, y = 0, y + 1
        found.append(pieces)
    return found, y + (x > 0)


def visible(text: str) -> str:
    """Replace letters that the font lacks, one by one; a token without letters becomes a dot."""
    known = {"\n": "↵", "\t": "→"}
    letters = _letters()
    return "".join(known.get(one, one if ord(one) in letters and one.isprintable() else "□") for one in text) or "·"


@lru_cache(maxsize=1)
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans Mono")).get_charmap())


# Journeys and item histories.


def _draw_visits(shown: Data, data: Data) -> Figure:
    """A row for each session, so that a longer history gives a taller picture; layers are side by side."""
    layers, colours, used = _shown_layers(shown["layers"]), block_colours(data["choices"]), _used([shown])
    where, labels, kinds = visit_places(shown["kinds"], shown["texts"])
    labels = [shorten(label, LABEL_LETTERS) for label in labels]
    left, gap = 0.2 + LABEL_LETTER * max(map(len, labels)), 0.15
    top = 0.3 + LABEL_LETTER * max(map(len, kinds)) + 0.1
    width, height = (PHONE_INCHES - left) / len(layers) - gap, len(labels) * ROW
    numbered = LABEL_LETTER * len(str(max(used, default=0))) + 0.05 < width / len(kinds)
    figure = Figure(figsize=(PHONE_INCHES, top + height + 0.1 + legend_inches(used, PHONE_INCHES)))
    for number, layer in enumerate(layers):
        axes = add_inches(figure, left + number * (width + gap), top, width, height)
        axes.set_axis_on()
        axes.set(xlim=(0, len(kinds)), ylim=(len(labels), 0))
        cells = [Cell(column, row, 1, 1, ids) for (column, row), ids in zip(where, layer["ids"], strict=True)]
        draw_cells(axes, cells, colours, pale=PALE)
        for one in cells if numbered else ():
            look = {"fontsize": PHONE_POINTS - 1, "color": ON_COLOUR, **_MIDDLE}
            axes.text(one.x + 0.5, one.y + 0.42, str(one.ids[0]) if one.ids else "", **look)
        axes.set_xticks([column + 0.5 for column in range(len(kinds))], kinds, rotation=90)
        axes.set_yticks([row + 0.5 for row in range(len(labels))], labels if number == 0 else [""] * len(labels))
        axes.tick_params(length=0, labelsize=PHONE_POINTS, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        title = layer_title(layer["layer"]).capitalize()
        figure.text(axes.get_position().x0, 1 - 0.2 / figure.get_size_inches()[1], title, fontsize=PHONE_POINTS)
    add_legend(figure, used, colours, data["unit"])
    return figure


def visit_places(kinds: Sequence[str], texts: Sequence[str]) -> tuple[list[tuple[int, int]], list[str], list[str]]:
    """(column, row) of each token, the rows' labels and the columns' names.

    A session is a row of scenario, intention and feedback; profile tokens fill the rows before. Items form a column.
    """
    if kinds[0] == "item":
        return [(0, place) for place in range(len(kinds))], list(texts), [""]
    where, labels = [], []
    for place, (kind, text) in enumerate(zip(kinds, texts, strict=True)):
        column = COLUMNS.get(kind, place % len(COLUMNS))
        if column == 0:
            labels.append("profile" if kind == "profile" else text)
        elif kind == "intention":
            labels[-1] += f" {text}"
        where.append((column, len(labels) - 1))
    return where, labels, list(COLUMNS)
