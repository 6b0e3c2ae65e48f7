"""Runs of a comparison side by side, each a process of its own with its share of the cores, or a GPU."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from intbmoe.analysis.compare import Job, Plan
from intbmoe.recipes import recipe_to_dict
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train.errors import RunConflictError
from intbmoe.train.files import full_disk_is_explained
from intbmoe.train.run import RunLock
from intbmoe.train.signals import STARTED_BY

POLL_SECONDS = 0.3
GRACE_SECONDS = 120
LOG_LINES = 12
PROCESS_BYTES = 2**30
BYTES_A_PARAMETER = 20
"""Weights, gradient, Adam's two moments and a copy while they change, in float32."""


@dataclass(frozen=True)
class Failure:
    """A run that did not come to its end."""

    title: str
    log: Path
    tail: str


@dataclass
class _Process:
    job: Job
    popen: subprocess.Popen
    slot: int
    log: Path
    log_start: int
    """Where in the log this start begins: earlier ones stay above it."""
    started: float
    bar: TaskID | None = None
    metrics: "_Tail" = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = _Tail(self.job.run.metrics_path)


class _Tail:
    """The last line of a growing file of JSON lines, without reading it all again."""

    BYTES = 8192

    def __init__(self, path: Path) -> None:
        self.path = path

    def row(self) -> dict[str, Any]:
        """The last whole line that is one; empty if there is none."""
        try:
            with open(self.path, "rb") as file:
                file.seek(max(0, self.path.stat().st_size - self.BYTES))
                lines = file.read().split(b"\n")[:-1]
        except OSError:
            return {}
        for line in reversed(lines):
            try:
                return json.loads(line)
            except ValueError:
                continue
        return {}


def choose_jobs(plan: Plan, runs: int, wanted: int | None) -> int:
    """How many runs go side by side: as wanted, else one a GPU, else what cores and free memory allow."""
    if wanted is not None:
        return max(1, min(wanted, runs))
    if torch.cuda.is_available():
        return max(1, min(torch.cuda.device_count(), runs))
    need = PROCESS_BYTES + BYTES_A_PARAMETER * plan.largest
    return max(1, min(cores(), runs, int(psutil.virtual_memory().available * 0.9 // need)))


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(jobs: int) -> int:
    """Threads of one of ``jobs`` runs: its share of the cores, or fewer where OMP_NUM_THREADS says so."""
    share = max(1, cores() // jobs)
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list is for nested regions
    return min(share, int(wanted)) if wanted.isdecimal() and int(wanted) else share


def run_jobs(plan: Plan, waiting: Sequence[Job], jobs: int, console: Console) -> list[Failure]:
    """Train all ``waiting`` runs, ``jobs`` at a time; returns those that failed.

    On Ctrl-C or SIGTERM the running ones save and stop, and ``KeyboardInterrupt`` goes on.
    """
    queue, running, failures = deque(waiting), [], []
    free = deque(range(jobs))
    report = _Report(console, total=len(plan.jobs), done=len(plan.jobs) - len(waiting), train=plan.recipe.train)
    with _SigtermInterrupts(), report:
        try:
            while queue or running:
                while queue and free:
                    report.waiting(queue[0])
                    running.append(_start(plan, queue.popleft(), free.popleft(), jobs))
                    report.started(running[-1])
                time.sleep(POLL_SECONDS)
                for process in [process for process in running if process.popen.poll() is not None]:
                    running.remove(process)
                    free.append(process.slot)
                    if process.popen.returncode == 0 and process.job.run.finished:
                        report.finished(process)
                    else:
                        failures.append(_failure(process))
                        report.failed(process, failures[-1])
                for process in running:
                    report.progress(process)
        except BaseException:
            _stop(running)
            raise
    return failures


def _start(plan: Plan, job: Job, slot: int, jobs: int) -> _Process:
    """The ordinary ``intbmoe train`` on a recipe written out: the same by hand if something goes wrong."""
    folder = plan.folder / "jobs"
    stem = f"{job.variant.label}-{job.seed}"
    recipe, log = folder / f"{stem}.yaml", folder / f"{stem}.log"
    text = yaml.safe_dump(recipe_to_dict(job.recipe), sort_keys=False, allow_unicode=True)
    root = plan.folder.parent.parent
    command = [sys.executable, "-m", "intbmoe.cli", "train", str(recipe), "--root", str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads(jobs)), "PYTHONUNBUFFERED": "1"}
    environment[STARTED_BY] = str(os.getpid())
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = _visible_gpus()[slot % torch.cuda.device_count()]
    with full_disk_is_explained(folder, "free some space and start again; the runs go on where they were"):
        folder.mkdir(parents=True, exist_ok=True)
        recipe.write_text(text, encoding="utf-8")
        # Appended to: a run of a comparison that was killed may still have it open.
        with open(log, "ab") as output:
            output.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {shlex.join(command)}\n".encode())
            output.flush()
            log_start = output.tell()
            popen = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then asks the runs to stop
            )
    return _Process(job, popen, slot, log, log_start, time.monotonic())


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def _failure(process: _Process) -> Failure:
    lines = process.log.read_bytes()[process.log_start :].decode(errors="replace").splitlines()
    tail = [line for line in lines if line.strip()][-LOG_LINES:]
    code = process.popen.returncode
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return Failure(process.job.title, process.log, "\n".join([*tail, f"({ended})"]))


def _stop(running: Sequence[_Process]) -> None:
    """Ask the runs to save and stop; those that do not are ended."""
    for process in running:
        process.popen.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        try:
            process.popen.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()


class _SigtermInterrupts:
    """While it is open, SIGTERM raises KeyboardInterrupt as Ctrl-C does."""

    def __enter__(self) -> None:
        self._old: Any = signal.signal(signal.SIGTERM, self._raise)

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, self._old)

    @staticmethod
    def _raise(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


class _Report:
    """On a terminal a bar over all runs and a line for each running one; elsewhere a plain line a run."""

    def __init__(self, console: Console, total: int, done: int, train: TrainSettings) -> None:
        self.console, self.total, self.done, self.train = console, total, done, train
        columns = (BarColumn(bar_width=24), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
        title = TextColumn("{task.description}")
        self.bars = Progress(title, *columns, console=console, disable=not console.is_terminal)
        self._print: Callable[[str], None] = lambda text: console.print(text, markup=False, highlight=False)

    def __enter__(self) -> "_Report":
        self.bars.start()
        self.all = self.bars.add_task("[bold]all runs", total=self.total, completed=self.done, state=self._share())
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()

    def _share(self) -> str:
        return f"{self.done}/{self.total}"

    def waiting(self, job: Job) -> None:
        """Say so if another process has the run: the one about to be started then waits for it."""
        if not job.run.path.is_dir():
            return
        try:
            with RunLock(job.run.path):
                pass
        except RunConflictError as conflict:
            self._print(f"waiting  {job.title}: {conflict}")

    def started(self, process: _Process) -> None:
        process.bar = self.bars.add_task(process.job.title, total=1.0, state="starting")
        if not self.console.is_terminal:
            self._print(f"started  {process.job.title}")

    def progress(self, process: _Process) -> None:
        row = process.metrics.row()
        if "epoch" not in row or process.bar is None:
            return
        steps = self.train.steps
        state = f"epoch {row['epoch']:.1f}/{self.train.epochs:g}" if steps is None else f"step {row['step']}/{steps}"
        if isinstance(row.get("loss"), float):
            state += f"  loss {row['loss']:.3f}"
        self.bars.update(
            process.bar,
            completed=row["epoch"] / self.train.epochs if steps is None else row["step"] / steps,
            state=state,
        )

    def _close(self, process: _Process) -> None:
        self.done += 1
        if process.bar is not None:
            self.bars.remove_task(process.bar)
        self.bars.update(self.all, completed=self.done, state=self._share())

    def finished(self, process: _Process) -> None:
        self._close(process)
        result = process.job.run.result
        test = ", ".join(f"{name} {value:.4f}" for name, value in result["test"].items())
        seconds = time.monotonic() - process.started
        self._print(f"[{self.done}/{self.total}] {process.job.title}: test {test} ({seconds:.0f} s)")

    def failed(self, process: _Process, failure: Failure) -> None:
        self._close(process)
        self._print(f"[{self.done}/{self.total}] {process.job.title}: FAILED, see {failure.log}")
