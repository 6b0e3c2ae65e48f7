"""The study: the paper's claim on real data, as many runs at a time as one GPU takes, in as many calls as it needs.

    python benchmarks/study.py --write-plan plan.json                   # resolve the plan once: a minute, no GPU
    python benchmarks/study.py --choose-rates                           # after --stages tune: rates, by validation
    python benchmarks/study.py --plan plan.json --list                  # what is done, what is left, how long it takes
    python benchmarks/study.py --plan plan.json --seconds 560 --jobs 5 --data tiny-imagenet=FILE.tar
    python benchmarks/study.py --only digits --set train.epochs=1 --seconds 60 --output /tmp/dry         # a dry run

Runs go in the plan's order (``study_plan.py``). One whose summary lies in ``--output`` is not run again; one that would
not end in time is not started. The moment a run ends its summary is written, and ``--pack`` gets a tar of all summaries
of this call. ``study_timing.py`` measures steps alone on the GPU; ``study_tables.py`` makes the tables of
docs/results.md.
"""

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from study_clock import Clock
from study_jobs import HERE, STOP_SECONDS, Lane, Running, pack, sharing_by_mps, start, stop
from study_plan import (
    REAL,
    STAGES,
    STUDIES,
    TUNING,
    Entry,
    change,
    choose_rates,
    free_settings,
    make_plan,
    read_plan,
    read_summaries,
    write_plan,
)

from intbmoe.train.run import git_state

RESULTS = HERE / "results" / "study"
POLL_SECONDS = 0.5


def main() -> int:
    """The command line."""
    options = parse()
    if options.choose_rates:
        rates = choose_rates(read_summaries(options.output))
        print(" ".join(f"--set {study}:train.lr={rate:g}" for study, rate in sorted(rates.items())))
        return 0
    entries = find_entries(options)
    if options.write_plan:
        write_plan(entries, options.write_plan)
        print(f"{len(entries)} runs: {options.write_plan}")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    finished = {summary["digest"] for summary in read_summaries(options.output)}
    clock = Clock(options.output, options.jobs)
    lanes = [Lane(device, options.jobs)]
    if options.cpu_jobs and device == "cuda":
        lanes = [Lane(device, options.jobs, leaves_small=True), Lane("cpu", options.cpu_jobs, small_only=True)]
    if options.list:
        show(entries, finished, clock, lanes)
        return 0
    waiting = [entry for entry in entries if entry.digest not in finished]
    return run_all(waiting, lanes, clock, options)


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description="Run the study, as much of it as fits into the time.")
    add = parser.add_argument
    add("--only", nargs="+", choices=list(STUDIES), help="only these studies; without it the four of the report")
    add("--stages", nargs="+", choices=[*STAGES, TUNING], help="only these stages")
    add("--set", action="append", default=[], help="key=value or study:key=value, for all methods alike")
    add("--plan", type=Path, help="a plan written before")
    add("--write-plan", type=Path, help="write the plan and stop")
    add("--list", action="store_true", help="show the plan and stop")
    add("--choose-rates", action="store_true", help="of the finished stage tune, print the best rates and stop")
    add("--data", action="append", default=[], help="study=PATH of its data")
    add("--run-with", action="append", default=[], help="key=value of a setting that changes no result: train.capture")
    add("--seconds", type=float, default=540.0, help="when all must be over")
    add("--jobs", type=int, default=4, help="runs side by side on the GPU, or on the CPU where there is none")
    add("--cpu-jobs", type=int, default=0, help="beside them, small studies on cores of their own")
    add("--output", type=Path, default=RESULTS, help="where summaries are kept")
    add("--pack", type=Path, help="folder for what travels back: study.tar, failures.txt, weights")
    add("--root", type=Path, default=Path("runs/study"), help="where runs are trained")
    add("--weights", nargs="+", default=[], help="ids (study/label/seed) that are packed whole, in half precision")
    add("--commit", help="of the source, where it was copied from a checkout")
    add("--unfinished", action="store_true", help="start also what cannot end: a later call with --root goes on")
    add("--mps", action="store_true", help="share the GPU through NVIDIA's MPS, where it is installed")
    return parser.parse_args()


def find_entries(options: argparse.Namespace) -> list[Entry]:
    """The plan, read or made, and of it what was asked for."""
    if options.plan is None:
        return make_plan(options.only or REAL, options.set, options.stages or STAGES, read_summaries(options.output))
    entries = [change(entry, options.set) for entry in read_plan(options.plan)]
    return [
        entry
        for entry in entries
        if (not options.only or entry.study in options.only) and (not options.stages or entry.stage in options.stages)
    ]


def show(entries: Sequence[Entry], finished: Set[str], clock: Clock, lanes: Sequence[Lane]) -> None:
    """The plan, what is done, and what the rest should take."""
    left: Counter[str] = Counter()
    for entry in entries:
        lane = next(lane for lane in reversed(lanes) if lane.takes(entry))
        seconds = clock.seconds(entry, lane.device)
        done = entry.digest in finished
        if not done:
            left[lane.device] += seconds / lane.places
        state = "done" if done else f"about {seconds:.0f} s"
        print(f"{entry.stage:10} {entry.id:48} {entry.steps:6} steps  {lane.device:4}  {state}")
    for device, seconds in left.items():
        print(f"left on {device}: about {seconds / 60:.0f} minutes")


@dataclass
class Call:
    """What holds for all runs of this call."""

    settings: dict[str, Any]
    began: float
    deadline: float
    unfinished: bool

    def say(self, text: str) -> None:
        """A line with the time."""
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)


def run_all(waiting: list[Entry], lanes: Sequence[Lane], clock: Clock, options: argparse.Namespace) -> int:
    """Until the plan or the time is over; the exit status is 1 if a run failed."""
    began = time.monotonic()
    settings = {
        **{name: getattr(options, name) for name in ("root", "output", "pack", "weights")},
        "run_with": free_settings(options.run_with),
        "data": dict(text.split("=", 1) for text in options.data),
        "side_by_side": sum(lane.places for lane in lanes),
        "commit": {"commit": options.commit} if options.commit else git_state(HERE.parent / "src" / "intbmoe"),
    }
    call = Call(settings, began, began + options.seconds - STOP_SECONDS, options.unfinished)
    call.say(f"{len(waiting)} runs wait; " + ", ".join(f"{lane.places} at a time on {lane.device}" for lane in lanes))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    running: list[Running] = []
    ended: list[Running] = []
    with sharing_by_mps(options.mps and lanes[0].device == "cuda", call.say):
        try:
            while time.monotonic() < call.deadline:
                _fill(waiting, running, lanes, clock, call)
                if not running:
                    break
                time.sleep(POLL_SECONDS)
                _watch(running, ended, clock, call)
        except KeyboardInterrupt:
            call.say("asked to stop")
        stop(running)
    _settle(running, ended, call)
    failed = sum(not one.finished for one in ended)
    call.say(f"{len(ended) - failed} finished, {failed} failed, {len(running)} stopped, {len(waiting)} wait")
    return 1 if failed else 0


def _fill(waiting: list[Entry], running: list[Running], lanes: Sequence[Lane], clock: Clock, call: Call) -> None:
    """Start runs on free places: the first in the plan that belong there and end in time."""
    for lane in lanes:
        for entry in list(waiting):
            if sum(one.lane is lane for one in running) >= lane.places:
                break
            seconds = clock.seconds(entry, lane.device)
            if lane.takes(entry) and (call.unfinished or time.monotonic() + seconds <= call.deadline):
                waiting.remove(entry)
                running.append(start(entry, lane, call.settings))
                call.say(f"started   {entry.id} on {lane.device}, about {seconds:.0f} s")


def _watch(running: list[Running], ended: list[Running], clock: Clock, call: Call) -> None:
    """Take note of progress, and of what has ended."""
    for one in list(running):
        if one.look() and one.step_seconds:
            clock.learn(one.entry, one.lane.device, one.step_seconds)
        if one.popen.poll() is not None:
            running.remove(one)
            ended.append(one)
            if one.finished and one.step_seconds:
                clock.learn_start(one.entry, one.lane.device, time.monotonic() - one.started, one.step_seconds)
            call.say(one.told())
            pack(call.settings["pack"], ended)


def _settle(running: list[Running], ended: list[Running], call: Call) -> None:
    """After all were asked to stop: one that was at its end is finished."""
    for one in list(running):
        if one.finished:
            running.remove(one)
            ended.append(one)
            call.say(one.told())
        else:
            where = f"at step {one.last[1]} of {one.entry.steps}" if one.last else "before its first line"
            call.say(f"stopped   {one.entry.id} {where}")
    pack(call.settings["pack"], ended)


if __name__ == "__main__":
    sys.exit(main())
