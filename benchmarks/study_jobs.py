"""Processes of the study: starting them on their lane, watching them, stopping them, packing what they leave."""

import io
import json
import os
import shutil
import signal
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

from study_plan import Entry, with_settings

from intbmoe.analysis.compare_jobs import cores
from intbmoe.recipes import recipe_from_dict, recipe_to_dict

HERE = Path(__file__).parent
STOP_SECONDS = 12
"""A run that is asked to stop has so long to save."""
TAIL_LINES = 6
TAIL_BYTES = 8192
MOST_THREADS = 4


@dataclass(frozen=True)
class Lane:
    """Places for runs on one device."""

    device: str
    places: int
    small_only: bool = False
    """Whether only studies small enough for a core run here."""
    leaves_small: bool = False
    """Whether another lane takes those."""

    def takes(self, entry: Entry) -> bool:
        """Whether the run belongs here."""
        return entry.on_cpu if self.small_only else not (entry.on_cpu and self.leaves_small)


@dataclass
class Running:
    """A run under way."""

    entry: Entry
    lane: Lane
    popen: subprocess.Popen
    log: Path
    summary: Path
    metrics: Path
    started: float
    first: tuple[float, int] | None = None
    last: tuple[float, int] | None = None

    def look(self) -> bool:
        """Note how far it is; whether it went on since the last look."""
        step = _last_step(self.metrics)
        if step is None or (self.last and step == self.last[1]):
            return False
        self.last = (time.monotonic(), step)
        self.first = self.first or self.last
        return True

    @property
    def step_seconds(self) -> float | None:
        """As observed since its first line of metrics: compiling and loading are not in it. None before a third."""
        if not self.first or self.last[1] < 3 * self.first[1]:
            return None
        return (self.last[0] - self.first[0]) / (self.last[1] - self.first[1])

    @property
    def finished(self) -> bool:
        """Whether it ended with a summary."""
        return self.popen.returncode == 0 and self.summary.is_file()

    def told(self) -> str:
        """The end, for a person."""
        if not self.finished:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            tail = "\n          ".join([line for line in lines if line.strip()][-TAIL_LINES:])
            return f"FAILED    {self.entry.id} (status {self.popen.returncode}):\n          {tail}"
        summary = json.loads(self.summary.read_text(encoding="utf-8"))
        metric = summary["metric"]
        shown = f"valid {metric} {summary['valid'][metric]:.4f}"
        if summary["test"]:
            shown += f", test {summary['test'][metric]:.4f}"
        memory = summary["peak_gpu_bytes"]
        gpu = f", {memory / 2**30:.1f} GiB" if memory else ""
        return f"finished  {self.entry.id}: {shown}, {summary['steps_per_second']:.1f} steps/s{gpu}"


def _last_step(metrics: Path) -> int | None:
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1])["step"] if lines else None
    except (OSError, ValueError):
        return None


def start(entry: Entry, lane: Lane, settings: dict[str, Any]) -> Running:
    """Start a run; ``settings`` are the call's, see ``study.py``."""
    folder = settings["root"] / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    run_with = dict(settings["run_with"])
    if lane.device == "cpu":
        run_with.pop("train.capture", None)
    if entry.study in settings["data"]:
        run_with["data.path"] = settings["data"][entry.study]
    recipe = recipe_to_dict(with_settings(recipe_from_dict(entry.recipe), run_with))
    stem = entry.file.removesuffix(".json")
    root, summary = settings["root"] / entry.digest[:8], settings["output"] / entry.file
    pack = settings["pack"]
    job = {
        "entry": {**vars(entry), "recipe": recipe},
        "root": str(root),
        "summary": str(summary),
        "weights": str(pack / f"{stem}.tar") if pack and entry.id in settings["weights"] else None,
        "side_by_side": settings["side_by_side"],
        "commit": settings["commit"],
    }
    path, log = folder / f"{stem}.json", folder / f"{stem}.log"
    path.write_text(json.dumps(job), encoding="utf-8")
    threads = 1 if lane.device == "cpu" else max(1, min(MOST_THREADS, cores() // settings["side_by_side"]))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if lane.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with open(log, "wb") as output:
        popen = subprocess.Popen(
            [sys.executable, str(HERE / "study_run.py"), str(path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    metrics = root / recipe["name"] / entry.label / str(entry.seed) / "metrics.jsonl"
    return Running(entry, lane, popen, log, summary, metrics, time.monotonic())


def stop(running: Sequence[Running]) -> None:
    """Ask all to save and end; those that do not are ended."""
    for one in running:
        one.popen.terminate()
    deadline = time.monotonic() + STOP_SECONDS - 2
    for one in running:
        try:
            one.popen.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(one.popen.pid, signal.SIGKILL)
            one.popen.wait()


def pack(folder: Path | None, ended: Sequence[Running]) -> None:
    """Summaries in one tar, beside those of earlier calls, and what failed runs said last: few files travel back."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    target, beside = folder / "study.tar", folder / ".study.tar.part"
    contents = {}
    if target.is_file():
        with tarfile.open(target) as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}
    contents |= {one.summary.name: one.summary.read_bytes() for one in ended if one.finished}
    with tarfile.open(beside, "w") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), int(time.time())
            tar.addfile(member, io.BytesIO(content))
    os.replace(beside, target)
    failures = [one.told() for one in ended if not one.finished]
    if failures:
        (folder / "failures.txt").write_text("\n".join(failures) + "\n", encoding="utf-8")


@contextmanager
def sharing_by_mps(wanted: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Let kernels of several processes run at the same time, by NVIDIA's service for that, if it can be started."""
    program = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if program is None:
        if wanted:
            say("no nvidia-cuda-mps-control here: runs take turns on the GPU")
        yield
        return
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = tempfile.mkdtemp(prefix="mps-")
    started = subprocess.run([program, "-d"], capture_output=True, text=True)
    say(f"MPS: {'started' if started.returncode == 0 else started.stderr.strip() or started.stdout.strip()}")
    try:
        yield
    finally:
        subprocess.run([program], input="quit\n", capture_output=True, text=True, timeout=20)
