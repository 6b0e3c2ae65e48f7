"""How tasks answer requests: what they share. ``export`` and ``serve`` ask it of a task and know none by name."""

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
