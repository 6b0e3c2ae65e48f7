"""Kills a process at a chosen file operation: a fork counts what it opens, renames, creates and removes in a folder."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

FORK = multiprocessing.get_context("fork")  # the child already has everything imported, which would take seconds
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "os.truncate")


def _watch(folder: Path, kill_at: int | None, counted: object, action: Callable[[], object]) -> None:
    real_sync = os.fsync

    def count() -> None:
        if counted.value == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        counted.value += 1

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event in OPERATIONS and any(str(folder) in str(argument) for argument in arguments):
            count()

    def sync(descriptor: int) -> None:
        count()
        real_sync(descriptor)

    os.fsync = sync
    sys.addaudithook(look)
    action()


def operations(folder: Path, action: Callable[[], object], kill_at: int | None = None) -> tuple[int, int]:
    """(operations of ``action`` in ``folder``, exit code) of a child that dies at operation ``kill_at``."""
    counted = FORK.Value("i", 0)
    child = FORK.Process(target=_watch, args=(folder, kill_at, counted, action))
    child.start()
    child.join(120)
    assert child.exitcode is not None, "the child hangs"
    return counted.value, child.exitcode


def chosen(count: int, number: int) -> list[int]:
    """``number`` of ``count`` operations, evenly spaced, including the first and the last."""
    return sorted({index * (count - 1) // (number - 1) for index in range(number)})
