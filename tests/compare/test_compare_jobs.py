"""How a comparison starts its runs, with something quicker in place of training."""

import os
import subprocess
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from intbmoe.compare import jobs
from intbmoe.compare.jobs import Lane, Scheduler, launch, run_jobs, threads
from intbmoe.compare.plan import CompareOptions, make_plan
from intbmoe.recipes import load_recipe
from intbmoe.train.signals import STARTED_BY
from lock_holder import locked_by_another


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """One run, which prints the process it belongs to and fails."""
    popen = subprocess.Popen

    def fail(command, **settings):
        return popen(["sh", "-c", f'echo "started by ${STARTED_BY}, threads $OMP_NUM_THREADS"; exit 3'], **settings)

    monkeypatch.setattr(jobs.subprocess, "Popen", fail)
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.05)
    return make_plan(load_recipe("digits"), CompareOptions(methods="dense", root=tmp_path))


def start(plan):
    output = StringIO()
    (failure,) = run_jobs(plan, plan.jobs, 1, Console(file=output, width=500))
    return failure, output.getvalue()


def test_threads_are_the_share_of_the_cores_and_no_more_than_asked_for(plan, monkeypatch):
    monkeypatch.setattr(jobs, "usable_cores", lambda: 8)
    for wanted, found in (("1", 1), ("3", 3), ("64", 4), ("2,1", 2), ("", 4), ("0", 4), ("many", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
        assert threads(jobs=2) == found
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (threads(jobs=2), threads(jobs=100)) == (4, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "threads 5" in start(plan)[0].tail


def test_a_log_keeps_what_earlier_starts_wrote_and_the_failure_shows_this_one(plan):
    log = plan.folder / "jobs/dense-0.log"
    log.parent.mkdir(parents=True)
    with open(log, "wb", buffering=0) as earlier:  # a run of a comparison that was killed
        earlier.write(b"step 1\n" * 100)
        failure, _ = start(plan)
        earlier.write(b"step 2\n")
    lines = failure.tail.splitlines()
    assert lines[0].startswith(f"started by {os.getpid()}, threads ")
    assert lines[1:] == ["(exit status 3)"]
    assert log.read_text().startswith("step 1\n" * 100)
    assert "-m intbmoe.cli train" in log.read_text(), "the command, to repeat it by hand"


def test_a_run_that_another_process_has_is_said_to_be_waited_for(plan):
    run = plan.jobs[0].run
    assert "waiting" not in start(plan)[1]
    with locked_by_another(run.path) as (holder, _):
        said = start(plan)[1]
    assert f"waiting  Dense, seed 0: process {holder.pid} is training in {run.path}" in said


def test_settings_of_runs_that_never_began_may_be_corrected(plan, tmp_path):
    run, corrected = plan.jobs[0].run, replace(plan.recipe, train=replace(plan.recipe.train, lr=0.5))
    run.path.mkdir(parents=True)
    run.claim(plan.jobs[0].recipe)
    options = CompareOptions(methods="dense", root=tmp_path)
    assert make_plan(corrected, options).jobs[0].run.path == run.path
    run.metrics_path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"other settings \(train\.lr"):
        make_plan(corrected, options)


class Recorded(Scheduler):
    """Runs shell commands in place of trainings, and records what becomes of them, in order."""

    def __init__(self, lanes, folder):
        super().__init__(lanes)
        self.folder, self.told = folder, []

    def start(self, job, lane, place):
        name, command = job
        return launch(job, lane, place, ["sh", "-c", command], self.folder / f"{name}.log", self.folder / "none", {})

    def progress(self, process): ...

    def ended(self, process):
        self.told.append((process.job[0], process.popen.returncode))

    def postponed(self, process, most_beside):
        (self.folder / "postponed").touch()
        self.told.append((process.job[0], f"at most {most_beside} beside it"))


def test_a_run_out_of_memory_starts_again_with_fewer_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.02)
    told = tmp_path / "postponed"
    fails = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'; exit 1"
    waiting = [(name, f"while [ ! -e '{told}' ]; do sleep 0.02; done") for name in ("first", "second")]
    waiting += [("large", f"if [ -e '{told}' ]; then exit 0; fi; {fails}"), ("never", fails)]
    recorded = Recorded([Lane("cuda", 3)], tmp_path)
    recorded.run(waiting)
    assert recorded.told[0] == ("large", "at most 1 beside it")
    ends = dict(recorded.told)
    assert (ends["first"], ends["second"], ends["large"]) == (0, 0, 0)
    assert recorded.told[-1] == ("never", 1), "alone it has failed"
    assert waiting == []


def test_runs_on_other_gpus_take_no_memory_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(Recorded, "memory", lambda self, lane, place: place)
    recorded = Recorded([Lane("cuda", 2)], tmp_path)
    recorded.run([("long", "sleep 0.3"), ("large", "echo out of memory; exit 1")])
    assert recorded.told == [("large", 1), ("long", 0)]
