"""Pictures of an analysis, each drawn from its saved data alone; one kind of picture per file.

A drawing function takes the content of one ``data/*.json`` and gives pictures, each with a caption: a title, what to
see, and how it was computed. The same data gives the same bytes.
"""

from collections.abc import Callable

from intbmoe.analysis.drawing.coefficients import draw_coefficients
from intbmoe.analysis.drawing.cost import draw_cost
from intbmoe.analysis.drawing.examples import draw_examples
from intbmoe.analysis.drawing.load import draw_load
from intbmoe.analysis.drawing.load_training import draw_load_training
from intbmoe.analysis.drawing.participation import draw_participation
from intbmoe.analysis.drawing.routing import draw_routing
from intbmoe.analysis.drawing.training import draw_training
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
"""Name of a data file → what draws it."""
