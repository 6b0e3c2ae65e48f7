"""Lines of metrics: what is averaged between two of them, and where they go."""

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from intbmoe.routing import load_statistics
from intbmoe.train.run import MetricsFile
from intbmoe.train.step import StepResult

LOAD_RATIOS = ("utilisation", "worst_case", "entropy", "dropped")


class Window:
    """Sums since the last line. They are part of a checkpoint, so that a resumed run writes the same lines."""

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums = dict(sums or {"steps": 0, "units": 0.0, "loss": 0.0, "aux": 0.0, "grad_norm": 0.0})

    def add(self, result: StepResult) -> None:
        """Take a step in."""
        self.sums["steps"] += 1
        self.sums["units"] += result.units
        self.sums["loss"] += result.loss * result.units
        self.sums["aux"] += result.aux * result.units
        self.sums["grad_norm"] += result.grad_norm

    def means(self) -> dict[str, float]:
        """Means over units, and of the gradient's norm over steps."""
        sums = self.sums
        return {
            "loss": sums["loss"] / sums["units"],
            "aux": sums["aux"] / sums["units"],
            "grad_norm": sums["grad_norm"] / sums["steps"],
        }


def mean_load(model: nn.Module, tell: Callable[[str], None]) -> dict[str, float]:
    """Load statistics since the last call, each averaged over the layers that choose; ``tell`` gets the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        statistics = list(load_statistics(model).values())
    for warning in caught:
        tell(f"note: {warning.message}")
    means = {}
    for name in LOAD_RATIOS:
        values = [value for found in statistics if not math.isnan(value := getattr(found, name))]
        if values:
            means[name] = fmean(values)
    return means


class MetricsLog:
    """``metrics.jsonl`` and TensorBoard. Throughput differs between repetitions, so only TensorBoard gets it."""

    def __init__(self, folder: Path, file: MetricsFile, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.file = file
        self.board = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, Any], speed: float | None = None) -> None:
        """One line. Values that are not finite have no place in JSON and are left out."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self.file.append({"step": step, "epoch": epoch, "split": split, **finite})
        for name, value in finite.items():
            self.board.add_scalar(f"{split}/{name}", value, step)
        if speed is not None:
            self.board.add_scalar(f"{split}/examples_per_second", speed, step)

    def sync(self) -> int:
        """Everything is on the disk; returns the length of ``metrics.jsonl``."""
        self.board.flush()
        return self.file.sync()

    def close(self) -> None:
        """No more lines."""
        self.board.close()
        self.file.close()
