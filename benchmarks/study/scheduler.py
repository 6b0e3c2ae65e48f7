"""Extends ``intbmoe.compare.jobs`` with a deadline: starts the runs that fit into the time and collects their files."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.clock import Clock
from benchmarks.study.plan import Entry, with_settings

from intbmoe.compare.jobs import Lane, Process, Scheduler, launch
from intbmoe.machine import usable_cores
from intbmoe.recipes import recipe_from_dict, recipe_to_dict

JOB = Path(__file__).parent / "job.py"
STOP_SECONDS = 12  # reserved at the end of a call, so that stopped runs can save
TAIL_LINES = 6
MOST_THREADS = 4


@dataclass(frozen=True)
class StudyLane(Lane):
    small_only: bool = False  # whether it takes only studies that are small enough for a core
    leaves_small: bool = False  # whether it leaves those to another lane

    def suits(self, entry: Entry) -> bool:
        return entry.on_cpu if self.small_only else not (entry.on_cpu and self.leaves_small)


class StudyScheduler(Scheduler):
    """Starts runs that can end in time, learns how long steps take, and keeps the summaries of finished runs.

    ``settings`` apply to all runs of the call: root, output, pack, weights, run_with, data, side_by_side, commit.
    """

    grace_seconds = STOP_SECONDS - 2

    def __init__(self, lanes: Sequence[StudyLane], clock: Clock, settings: dict[str, Any], unfinished: bool) -> None:
        super().__init__(lanes)
        self.clock, self.settings, self.unfinished = clock, settings, unfinished
        self.began = time.monotonic()
        self.deadline = float("inf")
        self.done: list[Process] = []
        self.steps: dict[str, list[tuple[float, int]]] = {}
        """For each run, when its first and its last line of metrics were seen, and their steps."""

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)

    def run(self, waiting: list[Entry], deadline: float = float("inf")) -> None:
        """Runs the jobs; runs that had just finished when they were asked to stop count as finished."""
        self.deadline = deadline
        try:
            super().run(waiting, deadline)
        except KeyboardInterrupt:
            self.say("asked to stop")
        for process in list(self.running):
            if self.finished(process):
                self.running.remove(process)
                self.ended(process)
            else:
                seen = self.steps.get(process.job.id)
                where = f"at step {seen[-1][1]} of {process.job.steps}" if seen else "before its first line"
                self.say(f"stopped   {process.job.id} {where}")

    def takes(self, entry: Entry, lane: StudyLane) -> bool:
        if not lane.suits(entry):
            return False
        return self.unfinished or time.monotonic() + self.clock.seconds(entry, lane.device) <= self.deadline

    def start(self, entry: Entry, lane: StudyLane, place: int) -> Process:
        settings = self.settings
        folder = settings["root"] / "jobs"
        folder.mkdir(parents=True, exist_ok=True)
        run_with = dict(settings["run_with"])
        if lane.device == "cpu":
            run_with.pop("train.capture", None)
        if entry.study in settings["data"]:
            run_with["data.path"] = settings["data"][entry.study]
        recipe = recipe_to_dict(with_settings(recipe_from_dict(entry.recipe), run_with))
        stem = entry.file.removesuffix(".json")
        root, packed = settings["root"] / entry.digest[:8], settings["pack"]
        job = {
            "entry": {**vars(entry), "recipe": recipe},
            "root": str(root),
            "summary": str(self.summary(entry)),
            "weights": str(packed / f"{stem}.tar") if packed and entry.id in settings["weights"] else None,
            "side_by_side": settings["side_by_side"],
            "commit": settings["commit"],
        }
        path = folder / f"{stem}.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        threads = 1 if lane.device == "cpu" else max(1, min(MOST_THREADS, usable_cores() // settings["side_by_side"]))
        environment = {"OMP_NUM_THREADS": str(threads)}
        if lane.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        metrics = root / recipe["name"] / entry.label / str(entry.seed) / "metrics.jsonl"
        command = [sys.executable, str(JOB), str(path)]
        self.say(f"started   {entry.id} on {lane.device}, about {self.clock.seconds(entry, lane.device):.0f} s")
        return launch(entry, lane, place, command, folder / f"{stem}.log", metrics, environment)

    def progress(self, process: Process) -> None:
        step, seen = process.last_row().get("step"), self.steps.get(process.job.id, [])
        if step is None or (seen and step == seen[-1][1]):
            return
        self.steps[process.job.id] = [*seen[:1], (time.monotonic(), step)]
        if seconds := self.step_seconds(process):
            self.clock.learn(process.job, process.lane.device, seconds)

    def step_seconds(self, process: Process) -> float | None:
        """Returns seconds per step after the first line of metrics, without compiling and loading; None at first."""
        seen = self.steps.get(process.job.id)
        if not seen or seen[-1][1] < 3 * seen[0][1]:
            return None
        return (seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1])

    def ended(self, process: Process) -> None:
        self.done.append(process)
        seconds = self.step_seconds(process)
        if self.finished(process) and seconds:
            self.clock.learn_start(process.job, process.lane.device, time.monotonic() - process.started, seconds)
        self.say(self.told(process))
        self.pack()

    def postponed(self, process: Process, most_beside: int) -> None:
        self.steps.pop(process.job.id, None)
        self.say(f"postponed {process.job.id}: out of memory beside {most_beside + 1} more")

    def summary(self, entry: Entry) -> Path:
        return self.settings["output"] / entry.file

    def finished(self, process: Process) -> bool:
        return process.popen.returncode == 0 and self.summary(process.job).is_file()

    def told(self, process: Process) -> str:
        if not self.finished(process):
            tail = "\n          ".join(process.last_words(TAIL_LINES))
            return f"FAILED    {process.job.id} (status {process.popen.returncode}):\n          {tail}"
        summary = json.loads(self.summary(process.job).read_text(encoding="utf-8"))
        metric, memory = summary["metric"], summary["peak_gpu_bytes"]
        shown = f"valid {metric} {summary['valid'][metric]:.4f}"
        if summary["test"]:
            shown += f", test {summary['test'][metric]:.4f}"
        gpu = f", {memory / 2**30:.1f} GiB" if memory else ""
        return f"finished  {process.job.id}: {shown}, {summary['steps_per_second']:.1f} steps/s{gpu}"

    def pack(self) -> None:
        """Packs summaries, outcomes and the last output of failed runs into a few files that can be copied back."""
        if self.settings["pack"] is not None:
            summaries = [self.summary(one.job) for one in self.done if self.finished(one)]
            outcomes = [path for summary in summaries if (path := summary.with_suffix(".npz")).is_file()]
            failures = [self.told(one) for one in self.done if not self.finished(one)]
            pack(self.settings["pack"], [*summaries, *outcomes], failures)


def pack(folder: Path, files: Sequence[Path], failures: Sequence[str] = ()) -> None:
    """Adds all files to one tar, next to those of earlier calls."""
    folder.mkdir(parents=True, exist_ok=True)
    target, beside = folder / "study.tar", folder / ".study.tar.part"
    contents = {}
    if target.is_file():
        with tarfile.open(target) as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}
    contents |= {file.name: file.read_bytes() for file in files}
    with tarfile.open(beside, "w") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), int(time.time())
            tar.addfile(member, io.BytesIO(content))
    os.replace(beside, target)
    if failures:
        (folder / "failures.txt").write_text("\n".join(failures) + "\n", encoding="utf-8")


@contextmanager
def sharing_by_mps(wanted: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Starts NVIDIA's MPS, if possible, so that kernels of several processes run at the same time."""
    program = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if program is None:
        if wanted:
            say("nvidia-cuda-mps-control is not installed: runs take turns on the GPU")
        yield
        return
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = tempfile.mkdtemp(prefix="mps-")
    started = subprocess.run([program, "-d"], capture_output=True, text=True)
    say(f"MPS: {'started' if started.returncode == 0 else started.stderr.strip() or started.stdout.strip()}")
    try:
        yield
    finally:
        subprocess.run([program], input="quit\n", capture_output=True, text=True, timeout=20)
