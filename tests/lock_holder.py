"""A process that holds a run's lock, for tests of a second process that wants it."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from intbmoe.train.run import run_lock

FORK = multiprocessing.get_context("fork")


@contextmanager
def locked_by_another(path: Path, at_last: Callable[[], object] = bool) -> Iterator[tuple[BaseProcess, Event]]:
    """The process, and an event on which it calls ``at_last`` and releases the lock; it ends with the block."""
    path.mkdir(parents=True)
    held, let_go = FORK.Event(), FORK.Event()

    def hold() -> None:
        with run_lock(path):
            held.set()
            let_go.wait(10)
            at_last()

    holder = FORK.Process(target=hold)
    holder.start()
    try:
        assert held.wait(10)
        yield holder, let_go
    finally:
        let_go.set()
        holder.join()
