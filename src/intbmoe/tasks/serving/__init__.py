"""What the tasks share to answer requests; ``export`` and ``serve`` use it and know no task by name."""

from intbmoe.tasks.serving.graph import Graph
from intbmoe.tasks.serving.predictor import Catalogue, Piece, Predictor, blocks_of, recording
from intbmoe.tasks.serving.requests import Answer, Encoded, Limits, Request, RequestError

__all__ = [
    "Answer",
    "Catalogue",
    "Encoded",
    "Graph",
    "Limits",
    "Piece",
    "Predictor",
    "Request",
    "RequestError",
    "blocks_of",
    "recording",
]
