"""The command line of the study.

    python -m benchmarks.study --write-plan plan.json                   # resolve the plan once: a minute, no GPU
    python -m benchmarks.study --choose-rates                           # after --stages tune: the best rates
    python -m benchmarks.study --plan plan.json --list                  # finished and remaining runs, and their time
    python -m benchmarks.study --plan plan.json --seconds 560 --jobs 5 --data tiny-imagenet=FILE.tar
    python -m benchmarks.study --only digits --set train.epochs=1 --seconds 60 --output /tmp/dry         # a dry run

Runs start in the plan's order. A run that has a summary in ``--output`` is not repeated; a run that would not end in
time is not started. When a run ends, its summary is written, and ``--pack`` gets a tar of all summaries of this call.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path

import torch
from benchmarks.study import plan
from benchmarks.study.clock import Clock
from benchmarks.study.scheduler import STOP_SECONDS, StudyLane, StudyScheduler, sharing_by_mps
from benchmarks.study.studies import REAL, STUDIES

from intbmoe.train.run import git_state


def main() -> int:
    options = parse()
    if options.choose_rates:
        rates = plan.choose_rates(plan.read_summaries(options.output))
        print(" ".join(f"--set {study}:train.lr={rate:g}" for study, rate in sorted(rates.items())))
        return 0
    entries = find_entries(options)
    if options.write_plan:
        plan.write_plan(entries, options.write_plan)
        print(f"{len(entries)} runs: {options.write_plan}")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    finished = {summary["digest"] for summary in plan.read_summaries(options.output)}
    clock = Clock(options.output, options.jobs)
    lanes = [StudyLane(device, options.jobs)]
    if options.cpu_jobs and device == "cuda":
        lanes = [
            StudyLane(device, options.jobs, leaves_small=True),
            StudyLane("cpu", options.cpu_jobs, small_only=True),
        ]
    if options.list:
        show(entries, finished, clock, lanes)
        return 0
    waiting = [entry for entry in entries if entry.digest not in finished]
    return run_all(waiting, lanes, clock, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run as much of the study as fits into the time.")
    add = parser.add_argument
    add("--only", nargs="+", choices=list(STUDIES), help="only these studies (default: the main ones)")
    add("--stages", nargs="+", choices=[*plan.STAGES, plan.TUNING], help="only these stages")
    add("--set", action="append", default=[], help="key=value or study:key=value, for all methods")
    add("--plan", type=Path, help="a plan from --write-plan")
    add("--write-plan", type=Path, help="write the plan and stop")
    add("--list", action="store_true", help="show the plan and stop")
    add("--choose-rates", action="store_true", help="print the best rates of the finished stage tune and stop")
    add("--data", action="append", default=[], help="study=PATH of its data")
    add("--run-with", action="append", default=[], help="key=value that changes no result, such as train.capture")
    add("--seconds", type=float, default=540.0, help="time limit for the whole call")
    add("--jobs", type=int, default=4, help="parallel runs on the GPU, or on the CPU if there is none")
    add("--cpu-jobs", type=int, default=0, help="additional parallel runs of small studies on spare cores")
    add("--output", type=Path, default=plan.RESULTS, help="where summaries are kept")
    add("--pack", type=Path, help="folder for the files to copy back: study.tar, failures.txt, weights")
    add("--root", type=Path, default=Path("runs/study"), help="where runs are trained")
    add("--weights", nargs="+", default=[], help="ids (study/label/seed) whose weights to pack, in half precision")
    add("--commit", help="the commit of the source, if this is a copy of a checkout")
    add("--unfinished", action="store_true", help="also start runs that cannot end; a later call resumes them")
    add("--mps", action="store_true", help="share the GPU through NVIDIA's MPS, if it is installed")
    return parser.parse_args()


def find_entries(options: argparse.Namespace) -> list[plan.Entry]:
    if options.plan is None:
        return plan.make_plan(
            options.only or REAL, options.set, options.stages or plan.STAGES, plan.read_summaries(options.output)
        )
    entries = [plan.change(entry, options.set) for entry in plan.read_plan(options.plan)]
    return [
        entry
        for entry in entries
        if (not options.only or entry.study in options.only) and (not options.stages or entry.stage in options.stages)
    ]


def show(entries: Sequence[plan.Entry], finished: Set[str], clock: Clock, lanes: Sequence[StudyLane]) -> None:
    left: Counter[str] = Counter()
    for entry in entries:
        lane = next(lane for lane in reversed(lanes) if lane.suits(entry))
        seconds = clock.seconds(entry, lane.device)
        done = entry.digest in finished
        if not done:
            left[lane.device] += seconds / lane.places
        state = "done" if done else f"about {seconds:.0f} s"
        print(f"{entry.stage:10} {entry.id:48} {entry.steps:6} steps  {lane.device:4}  {state}")
    for device, seconds in left.items():
        print(f"left on {device}: about {seconds / 60:.0f} minutes")


def run_all(waiting: list[plan.Entry], lanes: Sequence[StudyLane], clock: Clock, options: argparse.Namespace) -> int:
    """Runs until the plan or the time is over; the exit status is 1 if a run failed."""
    settings = {
        **{name: getattr(options, name) for name in ("root", "output", "pack", "weights")},
        "run_with": plan.free_settings(options.run_with),
        "data": dict(text.split("=", 1) for text in options.data),
        "side_by_side": sum(lane.places for lane in lanes),
        "commit": {"commit": options.commit} if options.commit else git_state(plan.SOURCE),
    }
    study = StudyScheduler(lanes, clock, settings, options.unfinished)
    study.say(f"{len(waiting)} runs wait; " + ", ".join(f"{lane.places} at a time on {lane.device}" for lane in lanes))
    with sharing_by_mps(options.mps and lanes[0].device == "cuda", study.say):
        study.run(waiting, time.monotonic() + options.seconds - STOP_SECONDS)
    failed = sum(not study.finished(one) for one in study.done)
    finished, stopped = len(study.done) - failed, len(study.running)
    study.say(f"{finished} finished, {failed} failed, {stopped} stopped, {len(waiting)} wait")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
