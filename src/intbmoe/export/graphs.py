"""The model of each task as a function of tensors alone, for ONNX and AOTInductor.

    vision      images (B, channels, H, W)                                    → scores (B, classes)
    language    ids (B, T), mask (B, T)                                       → scores (B, T, vocabulary)
    sequences   items (B, T), −1 after the last                               → log-probabilities (B, items)
    travel      profile (B, 6), scenario (B, S, 6), place (B, S, 5), feedback (B, S, 2), via (B, S, 5), mask (B, S)
                                                                              → scores (B, places)

B and the length (T, S) are free. Those of travel are the scores of all places of the catalogue for the last session of
each sequence, of which only the scenario is known; the vectors of the places are part of the graph.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.export.errors import ExportError
from intbmoe.models.travel import TravelModel
from intbmoe.precision import wide
from intbmoe.tasks.base import Batch

OUTPUT = "scores"
LONGEST_TEXT = 8192
"""Tokens: rotary positions have no limit of their own."""


class TravelScores(nn.Module):
    """Sessions to the scores of all places, for each sequence's last session."""

    def __init__(self, model: TravelModel, codes: Tensor) -> None:
        super().__init__()
        self.model = model
        with torch.no_grad():
            self.vectors = wide(model.encode_places(codes)) * model.config.dim**-0.5

    def forward(
        self, profile: Tensor, scenario: Tensor, place: Tensor, feedback: Tensor, via: Tensor, mask: Tensor
    ) -> Tensor:
        """As ``graphs.py`` says; padding stands after the sessions."""
        sessions = {"scenario": scenario, "place": place, "feedback": feedback, "via": via, "mask": mask}
        predictions = self.model.predict({"profile": profile, **sessions})
        last = (mask.sum(1) - 1).view(-1, 1, 1).expand(-1, 1, predictions.shape[2])
        return F.linear(wide(predictions.gather(1, last).squeeze(1)), self.vectors)


class Graph:
    """What goes in, what may vary, and how a batch of the task becomes it."""

    def __init__(self, task: str, recipe: Any) -> None:
        self.task = task
        self.length_name, self.longest = {
            "vision": (None, None),
            "language": ("tokens", LONGEST_TEXT),
            "sequences": ("items", recipe.model.length if task == "sequences" else None),
            "travel": ("sessions", recipe.model.sessions if task == "travel" else None),
        }[task]
        self.names: tuple[str, ...] = {
            "vision": ("images",),
            "language": ("ids", "mask"),
            "sequences": ("items",),
            "travel": ("profile", "scenario", "place", "feedback", "via", "mask"),
        }[task]

    def wrap(self, model: nn.Module, catalogue: Mapping[str, Tensor]) -> nn.Module:
        """``model`` with these inputs, one after another."""
        return TravelScores(model, catalogue["codes"][1:]).eval() if self.task == "travel" else model

    def inputs(self, batch: Batch, dtype: torch.dtype, length: int | None = None) -> tuple[Tensor, ...]:
        """The inputs from a batch of the task; with ``length`` all is cut to it."""
        if self.task == "language":
            batch = {**batch, "mask": torch.ones_like(batch["ids"], dtype=torch.bool)}
        found = [batch[name] for name in self.names]
        if length is not None:
            found = [
                value if name in ("images", "profile") else value[:, :length].contiguous()
                for name, value in self._named(found)
            ]
        return tuple(value.to(dtype) if value.is_floating_point() else value for value in found)

    def shapes_to_try(self, batch: Batch) -> list[tuple[int, int | None]]:
        """(rows, length) of parts of a batch: all of it, and small and odd ones."""
        rows = len(batch[self.names[-1]] if self.task != "language" else batch["ids"])
        if self.longest is None:
            return [(count, None) for count in sorted({rows, 1, min(5, rows)})]
        longest = batch["ids" if self.task == "language" else self.names[-1]].shape[1]
        return [(rows, longest), (1, 1), (min(5, rows), max(1, longest // 2)), (1, longest)]

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """For each input, which dimensions are free."""
        batch = torch.export.Dim("batch", min=1, max=65_536)
        length = None if self.length_name is None else torch.export.Dim(self.length_name, min=1, max=self.longest)
        with_length = {0: batch} if length is None else {0: batch, 1: length}
        return tuple({0: batch} if name in ("images", "profile") else with_length for name in self.names)

    def _named(self, values: list[Tensor]) -> Any:
        return zip(self.names, values, strict=True)


@torch.no_grad()
def trace(graph: Graph, model: nn.Module, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """``model`` as a program of tensor operations in which batch and length are free."""
    try:
        return torch.export.export(model, example, dynamic_shapes=graph.dynamic_shapes())
    except Exception as error:  # torch raises many kinds where a model cannot be traced
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ExportError(f"torch.export cannot trace this model with a free batch and length: {reason}") from error
