"""Runs side by side, each in its own process: one scheduler for comparisons and for the study."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from intbmoe.compare.plan import Job, Plan
from intbmoe.machine import usable_cores
from intbmoe.recipes import recipe_to_dict
from intbmoe.train.errors import OUT_OF_MEMORY, RunConflictError
from intbmoe.train.files import full_disk_is_explained
from intbmoe.train.run import run_lock
from intbmoe.train.signals import STARTED_BY

POLL_SECONDS = 0.3
LOG_LINES = 12
TAIL_BYTES = 8192
PROCESS_BYTES = 2**30
BYTES_PER_PARAMETER = 20  # weights, gradient, Adam's two moments and a copy during the update, in float32


@dataclass(frozen=True)
class Lane:
    device: str
    places: int


@dataclass
class Process:
    job: Any
    lane: Lane
    place: int  # its number within the lane
    popen: subprocess.Popen
    log: Path
    log_start: int  # where in the log this start begins; earlier starts are above it
    metrics: Path  # the run's growing file of JSON lines
    started: float

    def last_row(self) -> dict[str, Any]:
        try:
            with open(self.metrics, "rb") as file:
                file.seek(max(0, self.metrics.stat().st_size - TAIL_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except OSError:
            return {}
        for line in reversed(lines):
            try:
                return json.loads(line)
            except ValueError:
                continue
        return {}

    def last_words(self, most: int = LOG_LINES) -> list[str]:
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-most:]

    def lacked_memory(self) -> bool:
        return any(OUT_OF_MEMORY in line.lower() for line in self.last_words())


def launch(
    job: Any, lane: Lane, place: int, command: Sequence[str], log: Path, metrics: Path, environment: Mapping[str, str]
) -> Process:
    """Start ``command`` as a process that ends with this one, appending its output to ``log``."""
    # Append, because a run of a killed comparison may still have the log open.
    with open(log, "ab") as output:
        output.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {shlex.join(command)}\n".encode())
        output.flush()
        log_start = output.tell()
        popen = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1", STARTED_BY: str(os.getpid()), **environment},
            start_new_session=True,  # Ctrl-C reaches only this process, which then asks the runs to stop
        )
    return Process(job, lane, place, popen, log, log_start, metrics, time.monotonic())


class Scheduler(ABC):
    """Keeps the places of its lanes filled; subclasses know what a run is and what to print about it."""

    grace_seconds: float = 120  # how long a run has to save after it is asked to stop

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        self.running: list[Process] = []
        self._most_beside: dict[int, int] = {}
        """For jobs that ran out of memory, by ``id``: how many may run beside them when they start again."""

    def takes(self, job: Any, lane: Lane) -> bool:
        return True

    def memory(self, lane: Lane, place: int) -> Any:
        """Return the memory that a run there uses; runs with equal answers share it."""
        return lane

    @abstractmethod
    def start(self, job: Any, lane: Lane, place: int) -> Process: ...

    @abstractmethod
    def progress(self, process: Process) -> None:
        """Report progress; called repeatedly while the process runs."""

    @abstractmethod
    def ended(self, process: Process) -> None: ...

    @abstractmethod
    def postponed(self, process: Process, most_beside: int) -> None:
        """Report that it ran out of memory and waits until at most ``most_beside`` run beside it."""

    def run(self, waiting: list[Any], deadline: float = math.inf) -> None:
        """Take jobs from the front of ``waiting`` until all have ended, or until ``deadline`` (``time.monotonic``).

        Whatever still runs then is asked to save and stop, and stays in ``running``. The same happens on Ctrl-C and
        SIGTERM, which both raise ``KeyboardInterrupt``.
        """
        with _sigterm_interrupts():
            try:
                while time.monotonic() < deadline:
                    self._fill(waiting)
                    if not self.running:
                        break
                    time.sleep(POLL_SECONDS)
                    for process in self.running:
                        self.progress(process)
                    # If two have ended since the last look, each counts as having run beside the other.
                    ended = [process for process in self.running if process.popen.poll() is not None]
                    beside = [self._beside(process.lane, process.place) - 1 for process in ended]
                    for process, count in zip(ended, beside, strict=True):
                        self.running.remove(process)
                        self._end(process, count, waiting)
            finally:
                self._stop()

    def _fill(self, waiting: list[Any]) -> None:
        for lane in self.lanes:
            free = set(range(lane.places)) - {process.place for process in self.running if process.lane is lane}
            for job in list(waiting):
                suitable = [
                    place for place in free if self._beside(lane, place) <= self._most_beside.get(id(job), lane.places)
                ]
                if suitable and self.takes(job, lane):
                    waiting.remove(job)
                    place = min(suitable)
                    free.remove(place)
                    self.running.append(self.start(job, lane, place))

    def _beside(self, lane: Lane, place: int) -> int:
        """Count the runs there that use the same memory."""
        memory = self.memory(lane, place)
        return sum(self.memory(process.lane, process.place) == memory for process in self.running)

    def _end(self, process: Process, beside: int, waiting: list[Any]) -> None:
        """End a run, or let it start again with fewer beside it if it ran out of memory beside others."""
        if process.popen.returncode > 0 and beside and process.lacked_memory():
            self._most_beside[id(process.job)] = beside - 1
            waiting.append(process.job)
            self.postponed(process, beside - 1)
        else:
            self.ended(process)

    def _stop(self) -> None:
        """Ask the runs to save and stop; kill those that do not, with everything they started."""
        for process in self.running:
            process.popen.terminate()
        deadline = time.monotonic() + self.grace_seconds
        for process in self.running:
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.popen.pid, signal.SIGKILL)
                process.popen.wait()


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """While this is open, SIGTERM raises KeyboardInterrupt as Ctrl-C does."""
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def threads(jobs: int) -> int:
    """Return the threads of one of ``jobs`` runs: its share of the cores, or fewer if OMP_NUM_THREADS says so."""
    share = max(1, usable_cores() // jobs)
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # further numbers are for nested regions
    return min(share, int(wanted)) if wanted.isdecimal() and int(wanted) else share


# The runs of a comparison.


@dataclass(frozen=True)
class Failure:
    title: str
    log: Path
    tail: str


def choose_jobs(plan: Plan, runs: int, wanted: int | None) -> int:
    """Return how many runs go side by side: ``wanted``, else one per GPU, else what cores and free memory allow."""
    if wanted is not None:
        return max(1, min(wanted, runs))
    if torch.cuda.is_available():
        return max(1, min(torch.cuda.device_count(), runs))
    need = PROCESS_BYTES + BYTES_PER_PARAMETER * plan.largest
    return max(1, min(usable_cores(), runs, int(psutil.virtual_memory().available * 0.9 // need)))


def run_jobs(plan: Plan, waiting: Sequence[Job], jobs: int, console: Console) -> list[Failure]:
    comparison = _Comparison(plan, len(waiting), jobs, console)
    with comparison.bars:
        comparison.run(list(waiting))
    return comparison.failures


class _Comparison(Scheduler):
    """On a terminal, shows a bar for all runs and a line for each running one; elsewhere a plain line per run."""

    def __init__(self, plan: Plan, waiting: int, jobs: int, console: Console) -> None:
        super().__init__([Lane("cuda" if torch.cuda.is_available() else "cpu", jobs)])
        self.plan, self.console = plan, console
        # Later runs use as many threads as earlier ones, even if their share of the cores has grown since.
        begun = [count for job in plan.jobs if (count := job.run.threads()) is not None]
        self.threads = min([threads(jobs), *begun])
        self.total, self.done = len(plan.jobs), len(plan.jobs) - waiting
        self.failures: list[Failure] = []
        columns = (BarColumn(bar_width=24), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
        title = TextColumn("{task.description}")
        self.bars = Progress(title, *columns, console=console, disable=not console.is_terminal)
        self.all = self.bars.add_task("[bold]all runs", total=self.total, completed=self.done, state=self._share())
        self.bar_of: dict[str, TaskID] = {}

    def _share(self) -> str:
        return f"{self.done}/{self.total}"

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def start(self, job: Job, lane: Lane, place: int) -> Process:
        """Run the ordinary ``intbmoe train`` on a recipe file, so that the user can repeat it by hand if it fails."""
        self._say_if_waiting(job)
        folder = self.plan.folder / "jobs"
        tuned = job.recipe.name.removeprefix(self.plan.recipe.name)
        stem = f"{job.variant.label}-{job.seed}{tuned}"
        recipe, log = folder / f"{stem}.yaml", folder / f"{stem}.log"
        text = yaml.safe_dump(recipe_to_dict(job.recipe), sort_keys=False, allow_unicode=True)
        root = self.plan.folder.parent.parent
        command = [sys.executable, "-m", "intbmoe.cli", "train", str(recipe), "--root", str(root)]
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        if lane.device == "cuda":
            gpus = _visible_gpus()
            environment["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
        with full_disk_is_explained(folder, "free some space and start again; the runs resume where they were"):
            folder.mkdir(parents=True, exist_ok=True)
            recipe.write_text(text, encoding="utf-8")
            process = launch(job, lane, place, command, log, job.run.metrics_path, environment)
        self.bar_of[job.title] = self.bars.add_task(job.title, total=1.0, state="starting")
        if not self.console.is_terminal:
            self._say(f"started  {job.title}")
        return process

    def _say_if_waiting(self, job: Job) -> None:
        """Say that the run must wait, if another process is training it."""
        if job.run.path.is_dir():
            try:
                with run_lock(job.run.path):
                    pass
            except RunConflictError as conflict:
                self._say(f"waiting  {job.title}: {conflict}")

    def progress(self, process: Process) -> None:
        row, train = process.last_row(), process.job.recipe.train
        if "epoch" not in row:
            return
        if train.steps is None:
            done, state = row["epoch"] / train.epochs, f"epoch {row['epoch']:.1f}/{train.epochs:g}"
        else:
            done, state = row["step"] / train.steps, f"step {row['step']}/{train.steps}"
        if isinstance(row.get("loss"), float):
            state += f"  loss {row['loss']:.3f}"
        self.bars.update(self.bar_of[process.job.title], completed=done, state=state)

    def memory(self, lane: Lane, place: int) -> Any:
        return place % len(_visible_gpus()) if lane.device == "cuda" else lane

    def postponed(self, process: Process, most_beside: int) -> None:
        self.bars.remove_task(self.bar_of.pop(process.job.title))
        self._say(f"waiting  {process.job.title}: out of memory beside {most_beside + 1} more, restarts beside fewer")

    def ended(self, process: Process) -> None:
        self.done += 1
        self.bars.remove_task(self.bar_of.pop(process.job.title))
        self.bars.update(self.all, completed=self.done, state=self._share())
        job, code = process.job, process.popen.returncode
        if code == 0 and job.run.finished:
            test = ", ".join(f"{name} {value:.4f}" for name, value in job.run.result["test"].items())
            said = f"test {test} ({time.monotonic() - process.started:.0f} s)"
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            tail = "\n".join([*process.last_words(), f"({how})"])
            self.failures.append(Failure(job.title, process.log, tail))
            said = f"FAILED, see {process.log}"
        self._say(f"[{self.done}/{self.total}] {job.title}: {said}")


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
