"""Progress on the screen: a bar on a terminal, plain lines in a log, nothing when quiet."""

import time
from collections.abc import Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOWN = ("loss", "accuracy", "perplexity", "HR@5", "HR@10", "lr")


class TrainingProgress:
    """Shows steps, loss, throughput and time left (more in a log), and prints messages without breaking the bar."""

    def __init__(self, title: str, steps: int, quiet: bool, console: Console | None = None) -> None:
        self.title, self.steps, self.quiet = title, steps, quiet
        self.console = console or Console(stderr=True, soft_wrap=True, highlight=False)
        self.examples_per_second = 0.0  # over the last window of steps
        self._window = (0, 0.0)
        figures = TextColumn("{task.fields[figures]}")
        counted = BarColumn(12), MofNCompleteColumn()  # a short bar, so that everything fits into 80 columns
        columns = (TextColumn("{task.description}"), *counted, figures, TimeRemainingColumn())
        shown = self.console.is_terminal and not quiet
        self._bar = Progress(*columns, console=self.console, transient=True, disable=not shown)
        self._task = self._bar.add_task(title, total=steps, figures="")

    def start(self, step: int) -> None:
        """Begin at ``step``, which is not 0 in a resumed run."""
        self._window = (step, time.perf_counter())
        self._bar.reset(self._task, completed=step)
        self._bar.start()
        if self._bar.disable:
            self.say(f"{self.title}: {self.steps} steps" + (f", resuming after step {step}" if step else ""))

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def measure(self, step: int, batch: int) -> float:
        before, since = self._window
        now = time.perf_counter()
        self._window = (step, now)
        self.examples_per_second = (step - before) * batch / max(now - since, 1e-9)
        return self.examples_per_second

    def show(self, step: int, split: str, values: Mapping[str, float], batch: int) -> None:
        if self.quiet:
            return
        shown = [f"{name} {values[name]:.4g}" for name in SHOWN if name in values]
        if split == "train":
            shown.append(f"{self.examples_per_second:.0f} examples/s")
        figures = "  ".join(shown)
        if self._bar.disable or split != "train":
            seconds = (self.steps - step) * batch / max(self.examples_per_second, 1e-9)
            left = f"  {timedelta(seconds=round(seconds))} left" if split == "train" else ""
            self.say(f"{self.title}  step {step}/{self.steps}  {split}  {figures}{left}")
        if split == "train":
            self._bar.update(self._task, figures=f"{shown[0]}  {shown[-1]}")

    def say(self, message: str) -> None:
        """Print a message that ``quiet`` suppresses; warnings go through ``warn``."""
        if not self.quiet:
            self.console.print(message, markup=False)

    def warn(self, message: str) -> None:
        self.console.print(message, markup=False)

    def stop(self) -> None:
        self._bar.stop()


class PreparationProgress:
    """Shows the stages of ``intbmoe prepare``: a bar for each on a terminal, otherwise a line at its start and end."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
        self.bars = Progress(*columns, TimeElapsedColumn(), console=self.console, disable=not self.console.is_terminal)
        self._stages: dict[str, int] = {}
        self._ended: set[str] = set()

    def show(self, stage: str, done: int, total: int | None) -> None:
        """Show how much of ``stage`` is done, out of ``total`` (None: unknown)."""
        figures = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        if stage not in self._stages:
            self._stages[stage] = self.bars.add_task(stage, total=total, figures=figures)
            self._line(f"{stage} …")
        self.bars.update(self._stages[stage], completed=done, total=total, figures=figures)
        if total is not None and done >= total and stage not in self._ended:
            self._ended.add(stage)
            self._line(f"{stage}: {figures}")

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(text, markup=False)
