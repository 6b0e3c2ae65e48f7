"""Estimates how long a run of the study will take, so that no run is started that cannot end in time.

The time of a step is its time alone on the device (measured by ``timing.py``, or guessed), times the slow-down by other
runs, which is guessed until it has been observed.
"""

import json
from pathlib import Path
from statistics import median

from benchmarks.study.plan import TIMING, Entry
from benchmarks.study.studies import STUDIES

MARGIN = 1.08
START_SECONDS = {"cuda": 25.0, "cpu": 9.0}
"""Time for imports, reading data and compiling kernels, and at the end for the test split and counting."""
GUESSED_MS = {
    "cuda": {"tiny-imagenet": 12.0, "wikipedia": 40.0, "foursquare": 25.0, "foursquare-us": 25.0, "yelp": 25.0},
    "cpu": {
        "foursquare": 350.0,
        "foursquare-us": 700.0,
        "checkins": 320.0,
        "checkins-us": 400.0,
        "checkins-told": 450.0,
        "planted": 240.0,
        "digits": 15.0,
        "stdlib": 30.0,
    },
}
UNKNOWN_MS = 1000.0
GUESSED_CROWDING = 0.5  # how much longer a step on a GPU takes for each other run
RECENT = 12


class Clock:
    def __init__(self, output: Path, jobs: int) -> None:
        self.alone = read_timings(output)
        self.crowding = {"cuda": 1 + GUESSED_CROWDING * (jobs - 1), "cpu": 1.0}
        self.seen: dict[str, list[float]] = {"cuda": [], "cpu": []}
        self.starts: dict[str, list[float]] = {"cuda": [], "cpu": []}

    def step_seconds(self, entry: Entry, device: str) -> float:
        recipe = STUDIES[entry.study].recipe  # a follow-up's steps take about as long as those of the first study
        guess = GUESSED_MS[device].get(recipe, UNKNOWN_MS) / 1000
        return self.alone.get((device, entry.study, entry.label), guess)

    def seconds(self, entry: Entry, device: str) -> float:
        seen = self.seen[device][-RECENT:]
        crowding = median(seen) if seen else self.crowding[device]
        start = max(self.starts[device][-RECENT:], default=START_SECONDS[device])
        return start + MARGIN * entry.steps * self.step_seconds(entry, device) * crowding

    def learn(self, entry: Entry, device: str, observed: float) -> None:
        """Records that a step of ``entry`` took ``observed`` seconds."""
        self.seen[device].append(observed / self.step_seconds(entry, device))

    def learn_start(self, entry: Entry, device: str, seconds: float, step: float) -> None:
        """Records that a finished run took ``seconds`` in all and ``step`` seconds per step."""
        self.starts[device].append(max(0.0, seconds - entry.steps * step))


def read_timings(output: Path) -> dict[tuple[str, str, str], float]:
    """Reads the files of ``timing.py``: (device, study, label) → seconds of a step alone."""
    found = {}
    for path in sorted(output.glob(TIMING.format("*"))):
        timing = json.loads(path.read_text(encoding="utf-8"))
        for label, row in timing["rows"].items():
            if "step_ms" in row:
                found[timing["kind"], timing["study"], label] = row["step_ms"] / 1000
    return found
