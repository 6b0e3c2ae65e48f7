"""Pictures of an analysis, each drawn from its saved data alone.

A drawing function takes the content of one ``data/*.json`` and returns pictures, each with a caption: a title, what to
see, and how it was computed. The same data gives the same bytes.
"""

from collections.abc import Callable

from intbmoe.analysis.drawing.bases import draw_coefficients, draw_cost, draw_participation
from intbmoe.analysis.drawing.examples import draw_examples
from intbmoe.analysis.drawing.load import draw_load, draw_load_training, draw_training
from intbmoe.analysis.drawing.routing import draw_routing
from intbmoe.report.canvas import Data, Picture

DRAWERS: dict[str, Callable[[Data], list[Picture]]] = {
    "participation": draw_participation,
    "routing": draw_routing,
    "examples": draw_examples,
    "coefficients": draw_coefficients,
    "load": draw_load,
    "training": draw_training,
    "load_training": draw_load_training,
    "cost": draw_cost,
}
"""Name of a data file → the function that draws it."""
