"""What is known about places besides their codes: names and coordinates, for answers and their map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from intbmoe.tasks.serving.ranking import ranked_results
from intbmoe.tasks.serving.requests import Answer


@dataclass(frozen=True)
class DescribedPlaces:
    """Descriptions of an artifact's places; None if the data has none."""

    locations: np.ndarray | None = None  # (P, 2): longitude and latitude in degrees, NaN if unknown
    names: np.ndarray | None = None  # the UTF-8 of all names in sequence
    name_ends: np.ndarray | None = None  # (P,)

    @staticmethod
    def read(tensors: Mapping[str, Tensor]) -> "DescribedPlaces":
        found = {name: tensors[name].numpy() for name in ("locations", "names", "name_ends") if name in tensors}
        return DescribedPlaces(**found)

    def name(self, row: int) -> str:
        """Return the name of a place; empty if it has none."""
        if self.names is None or row < 0:
            return ""
        start = int(self.name_ends[row - 1]) if row else 0
        return self.names[start : int(self.name_ends[row])].tobytes().decode(errors="replace")

    def results(self, rows: np.ndarray, scores: np.ndarray, ids: np.ndarray, count: int) -> Answer:
        """Return the first ``count`` places with what is known about them, and a viewport around those located."""
        answer: Answer = {"results": ranked_results(ids[rows].tolist(), scores.tolist(), count)}
        if self.names is None and self.locations is None:
            return answer
        located = []
        for row, result in zip(rows.tolist(), answer["results"], strict=False):  # excluded rows come last
            if name := self.name(row):
                result["name"] = name
            if self.locations is not None and not np.isnan(self.locations[row]).any():
                located.append(self.locations[row].tolist())
                result["longitude"], result["latitude"] = located[-1]
        if located:
            answer["viewport"] = viewport(located)
        return answer


def viewport(locations: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the smallest box around (longitude, latitude); if it crosses the antimeridian, west exceeds east."""
    longitude, latitude = np.asarray(locations, np.float64).T
    around = np.unique(longitude)
    gaps = np.diff(around, append=around[0] + 360)
    widest = int(gaps.argmax())  # the box is everything but the widest gap
    west, east = around[(widest + 1) % len(around)], around[widest]
    return {"west": west.item(), "south": latitude.min().item(), "east": east.item(), "north": latitude.max().item()}
