"""Which tokens go where: shares of assignments minus uniform."""

import math
from collections.abc import Sequence

import numpy as np

from intbmoe.report.canvas import Data, Picture, colour_bar, heat_map, layer_title, make_panels, number_columns, shorten
from intbmoe.report.style import PHONE_INCHES, PHONE_POINTS

MOST_ROWS = 30  # most labels in one heat map; if there are more, those farthest from uniform. The data has all
LABEL_LETTERS = 30  # most letters of a row's label; the data has the whole label
COLUMN, LABEL_LETTER = 0.105, 0.077  # inches: smallest column, and a letter of a row's label


def draw_routing(data: Data) -> list[Picture]:
    return [_draw_view(view, data) for view in data["views"]]


def _draw_view(view: Data, data: Data) -> Picture:
    layers, unit = view["layers"], data["unit"]
    shown = _farthest(view)
    maps = []
    for layer in layers:
        nothing = [math.nan] * len(layer["choices"])
        maps.append(np.array([layer["minus_uniform"][row] or nothing for row in shown], dtype=float))
    widest = max(len(layer["choices"]) for layer in layers)
    labels = [shorten(view["labels"][row], LABEL_LETTERS) for row in shown]
    room = 0.3 + LABEL_LETTER * max(map(len, labels))
    size = COLUMN * widest + 0.1, 1.1 + 0.19 * len(shown)
    figure, panels = make_panels(len(layers), *size, view["name"], labels=room)
    columns = panels[0].get_subplotspec().get_gridspec().ncols
    limit = max((float(np.nanmax(np.abs(values))) for values in maps if not np.isnan(values).all()), default=0) or 1.0
    for axes, layer, values in zip(panels, layers, maps, strict=True):
        image = heat_map(axes, 100 * values, 100 * limit, layer_title(layer["layer"]))
        number_columns(axes, layer["choices"], unit, (PHONE_INCHES - room) / columns / len(layer["choices"]))
        axes.set_yticks(range(len(shown)), labels, fontsize=PHONE_POINTS - 1)
    colour_bar(figure, image, panels, "share minus uniform (percentage points)")
    row, column, layer, most = _strongest(view, layers)
    some = "" if len(shown) == len(view["labels"]) else f" Shown are {len(shown)} of {len(view['labels'])} rows, those "
    some += "" if not some else "farthest from uniform; the data has all."
    see = (
        f"Red: the {unit} gets more of these tokens than an equal share, blue: fewer, grey: no such token. "
        f"The strongest preference is that of {view['name']} {view['labels'][row]} for {unit} {column} in "
        f"{layer_title(layer)}: {100 * most:+.1f} percentage points.{some}"
        if layer
        else "No token had a label."
    )
    how = (
        f"The share of each {unit} in all assignments of tokens with a label, minus one over the number of {unit}s. "
        f"Every choice of a token counts as one assignment; padding never counts. {data['examples']} examples of the "
        f"{data['split']} split."
    )
    name = f"routing-{view['name'].replace(' ', '-')}"
    return Picture(name, f"Where tokens go, by {view['name']}", see, how, figure)


def _farthest(view: Data) -> list[int]:
    """The rows to show, in order: all, or the ``MOST_ROWS`` with the largest deviation in any layer."""
    rows = range(len(view["labels"]))
    if len(rows) <= MOST_ROWS or view.get("chosen"):
        return list(rows)

    def distance(row: int) -> float:
        return max((max(map(abs, layer["minus_uniform"][row] or [0])) for layer in view["layers"]), default=0)

    return sorted(sorted(rows, key=distance, reverse=True)[:MOST_ROWS])


def _strongest(view: Data, layers: Sequence[Data]) -> tuple[int, int, str, float]:
    """(row, column's number, layer, value) of the largest share; an empty layer if there is none."""
    found = (0, 0, "", -math.inf)
    for layer in layers:
        for row, values in enumerate(layer["minus_uniform"]):
            for column, value in zip(layer["choices"], values or [], strict=False):
                if value > found[3]:
                    found = (row, column, layer["layer"], value)
    return found
