"""Lines of metrics and loads: what is summed between two lines, and where they are written."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from intbmoe.routing import load_statistics
from intbmoe.statistics import LoadStatistics
from intbmoe.train.errors import DamagedFileError
from intbmoe.train.files import full_disk_is_explained
from intbmoe.train.run import RunDirectory
from intbmoe.train.step import StepResult

LOAD_RATIOS = ("utilisation", "worst_case", "entropy", "dropped", "untaken")


class Window:
    """Sums since the last line; they are part of a checkpoint, so that a resumed run writes the same lines."""

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums = dict(sums or {"steps": 0, "units": 0.0, "loss": 0.0, "aux": 0.0, "grad_norm": 0.0})

    def add(self, result: StepResult) -> None:
        loss, aux = result.loss * result.units, result.aux * result.units
        new = {"steps": 1, "units": result.units, "loss": loss, "aux": aux, "grad_norm": result.grad_norm}
        self.sums = {name: total + new[name] for name, total in self.sums.items()}

    def means(self) -> dict[str, float]:
        per = {"loss": "units", "aux": "units", "grad_norm": "steps"}
        return {name: self.sums[name] / self.sums[count] for name, count in per.items()}


def take_loads(model: nn.Module, tell: Callable[[str], None]) -> dict[str, LoadStatistics]:
    """Return the load of each layer that chooses experts since the last call; ``tell`` gets the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loads = load_statistics(model)
    for warning in caught:
        tell(f"note: {warning.message}")
    return loads


def mean_load(loads: Mapping[str, LoadStatistics]) -> dict[str, float]:
    means = {}
    for name in LOAD_RATIOS:
        found = [getattr(load, name) for load in loads.values()]
        values = [value for value in found if value is not None and not math.isnan(value)]
        if values:
            means[name] = fmean(values)
    return means


def load_line(load: LoadStatistics) -> dict[str, Any]:
    """Describe one layer for a line of ``loads.jsonl``; an expert that a growing pool has closed has the count None."""
    gone = {index for index, count in enumerate(load.counts) if count == 0} - set(load.dead)
    counts = [None if index in gone else count for index, count in enumerate(load.counts)]
    line: dict[str, Any] = {"tokens": load.tokens, "counts": counts}
    if load.dropped > 0:  # NaN if no assignment was wanted, which JSON cannot hold
        line["dropped"] = round(load.dropped, 6)
    if load.untaken is not None:
        line["untaken"] = round(load.untaken, 6)
    return line


class MetricsFile:
    """Appends lines to ``metrics.jsonl`` or ``loads.jsonl``, after cutting off those written after the checkpoint."""

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        found = path.stat().st_size if path.is_file() else 0
        if found < length:
            raise DamagedFileError(
                f"{path} has {found} bytes, but the checkpoint expects {length}: restore it from a copy"
            )
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._file.truncate(length)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line and hand it to the operating system, so that a kill loses nothing."""
        with full_disk_is_explained(self.path, "free some space and start again; the run resumes from its checkpoint"):
            line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> int:
        """Wait until all lines are on disk and return the file's length."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


class MetricsLog:
    """``metrics.jsonl``, ``loads.jsonl`` and TensorBoard; only TensorBoard gets throughput, which varies by run."""

    def __init__(self, run: RunDirectory, step: int, lengths: Mapping[str, int], loads: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.file = MetricsFile(run.metrics_path, lengths.get("metrics_length", 0))
        self.loads = MetricsFile(run.loads_path, lengths.get("loads_length", 0)) if loads else None
        self.board = SummaryWriter(str(run.path), purge_step=step + 1)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, Any], speed: float | None = None) -> None:
        """Write one line, without values that are not finite: JSON has no such numbers."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self.file.append({"step": step, "epoch": epoch, "split": split, **finite})
        for name, value in finite.items():
            self.board.add_scalar(f"{split}/{name}", value, step)
        if speed is not None:
            self.board.add_scalar(f"{split}/examples_per_second", speed, step)

    def write_loads(self, step: int, loads: Mapping[str, LoadStatistics]) -> None:
        if self.loads is not None and loads:
            self.loads.append({"step": step, "layers": {name: load_line(load) for name, load in loads.items()}})

    def sync(self) -> dict[str, int]:
        """Wait until everything is on disk and return the lengths of the files, as a checkpoint keeps them."""
        self.board.flush()
        loads = 0 if self.loads is None else self.loads.sync()
        return {"metrics_length": self.file.sync(), "loads_length": loads}

    def close(self) -> None:
        self.board.close()
        self.file.close()
        if self.loads is not None:
            self.loads.close()
