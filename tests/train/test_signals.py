"""A run that a comparison started does not outlive it."""

import multiprocessing
import os
import select
import signal
import sys
import time

import pytest

from intbmoe.train.signals import STARTED_BY, belongs_to_another

FORK = multiprocessing.get_context("fork")


def start_a_run(pipe):
    """Act as a comparison: the parent of a process that knows which process started it."""
    if os.fork() == 0:
        os.environ[STARTED_BY] = str(os.getppid())
        os.write(pipe, b"+" if belongs_to_another() else b"-")
    time.sleep(60)
    os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux to be notified of a parent's death")
def test_a_run_ends_with_the_process_that_started_it():
    ours, theirs = os.pipe()
    comparison = FORK.Process(target=start_a_run, args=(theirs,))
    comparison.start()
    os.close(theirs)
    assert os.read(ours, 1) == b"+"
    assert not select.select([ours], [], [], 0.1)[0], "both live"
    comparison.kill()
    comparison.join()
    ended, _, _ = select.select([ours], [], [], 10)
    assert ended, "the run still holds its end of the pipe"
    assert os.read(ours, 1) == b""
    os.close(ours)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux to be notified of a parent's death")
def test_a_run_whose_parent_is_gone_already_does_not_begin():
    def begin():
        os.environ[STARTED_BY] = str(os.getpid())  # any process but the parent
        belongs_to_another()

    run = FORK.Process(target=begin)
    run.start()
    run.join()
    assert run.exitcode == 128 + signal.SIGTERM


def test_who_types_the_command_owns_the_run(monkeypatch):
    monkeypatch.delenv(STARTED_BY, raising=False)
    assert not belongs_to_another()
