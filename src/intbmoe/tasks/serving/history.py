"""What requests with a history share: items of a user or journeys, from old to new, and what comes next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.tasks.serving.fields import Choice

HISTORY = 1000  # most entries of a history
TOP_N, MOST = 10, 100  # results by default, and at most
VISITED = (Choice(("allow", "exclude"), "Whether what is in the history may be recommended again."), "allow")
HISTORY_FORM = Path(__file__).with_name("history.js")


def ranked_results(ids: Sequence[int | str], scores: list[float], count: int) -> list[dict[str, Any]]:
    """The first ``count`` entries; those that were left out come last, with −∞, and are no result."""
    best = list(zip(ids, scores, strict=True))[:count]
    return [{"id": one, "score": score} for one, score in best if score != -np.inf]
