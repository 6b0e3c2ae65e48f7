"""What is known of places besides their codes: names and coordinates, for answers and their map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from intbmoe.tasks.serving.ranking import ranked_results
from intbmoe.tasks.serving.requests import Answer


@dataclass(frozen=True)
class DescribedPlaces:
    """Of an artifact's places; None where the data had no such thing."""

    locations: np.ndarray | None = None  # (P, 2): longitude and latitude in degrees, NaN where they are not known
    names: np.ndarray | None = None  # all names' UTF-8, one after another
    name_ends: np.ndarray | None = None  # (P,)

    @staticmethod
    def read(tensors: Mapping[str, Tensor]) -> "DescribedPlaces":
        found = {name: tensors[name].numpy() for name in ("locations", "names", "name_ends") if name in tensors}
        return DescribedPlaces(**found)

    def name(self, row: int) -> str:
        """Empty where a place has none."""
        if self.names is None or row < 0:
            return ""
        start = int(self.name_ends[row - 1]) if row else 0
        return self.names[start : int(self.name_ends[row])].tobytes().decode(errors="replace")

    def results(self, rows: np.ndarray, scores: np.ndarray, ids: np.ndarray, count: int) -> Answer:
        """The first ``count`` places with what is known of them, and the viewport that holds those with coordinates."""
        answer: Answer = {"results": ranked_results(ids[rows].tolist(), scores.tolist(), count)}
        if self.names is None and self.locations is None:
            return answer
        located = []
        for row, result in zip(rows.tolist(), answer["results"], strict=False):  # those left out come last
            if name := self.name(row):
                result["name"] = name
            if self.locations is not None and not np.isnan(self.locations[row]).any():
                located.append(self.locations[row].tolist())
                result["longitude"], result["latitude"] = located[-1]
        if located:
            answer["viewport"] = viewport(located)
        return answer


def viewport(locations: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The smallest box around (longitude, latitude); where it crosses the antimeridian, west is larger than east."""
    longitude, latitude = np.asarray(locations, np.float64).T
    around = np.unique(longitude)
    gaps = np.diff(around, append=around[0] + 360)
    widest = int(gaps.argmax())  # the box is everything but the widest gap
    west, east = around[(widest + 1) % len(around)], around[widest]
    return {"west": west.item(), "south": latitude.min().item(), "east": east.item(), "north": latitude.max().item()}
