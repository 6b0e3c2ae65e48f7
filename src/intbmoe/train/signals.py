"""How training is asked to stop: by Ctrl-C or SIGTERM, or because the process that started it has ended."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from intbmoe.tasks.workers import end_with_parent

STARTED_BY = "INTBMOE_STARTED_BY"  # the environment variable that tells a training which process it belongs to
ASKED = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 1.0
"""A signal repeated within this time is the same request: ``timeout`` signals the process and then its group."""


class StopRequest:
    """``with StopRequest(tell) as stop: … stop.signum``: end after the step; a second signal ends at once.

    If there are several ranks, a second signal is ignored: the launcher received the first one too and passes it on,
    and it ends ranks that take too long.
    """

    def __init__(self, tell: Callable[[str], None], world: int = 1) -> None:
        self._tell, self._alone = tell, world == 1
        self._before: dict[int, Any] = {}
        self._since = 0.0
        self.signum = 0  # the signal that came; 0 for none

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # other threads cannot set signal handlers
            self._before = {signum: signal.signal(signum, self._receive) for signum in ASKED}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def _receive(self, signum: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum == 0:
            self.signum, self._since = signum, now
            again = "; a second signal ends at once" if self._alone else ""
            self._tell(f"{signal.Signals(signum).name}: finishing the step and saving{again}")
        elif self._alone and now - self._since > ECHO_SECONDS:
            self.__exit__()
            os.kill(os.getpid(), signum)


@contextmanager
def children_miss_signals() -> Iterator[None]:
    """Processes started inside get neither SIGINT nor SIGTERM until they call ``leave_signals_to_parent``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent(_: int = 0) -> None:
    """Protect a data-loader worker from signals: it must live until its parent has finished the step and saved.

    Ctrl-C and schedulers signal a whole process group, so a worker gets a group of its own. A SIGTERM from the parent
    still ends it, and so does the end of the parent, whatever the cause.
    """
    os.setpgid(0, 0)
    for signum, handler in zip(ASKED, (signal.SIG_IGN, signal.SIG_DFL), strict=True):
        signal.signal(signum, signal.SIG_IGN)  # discards a signal that is already pending
        signal.signal(signum, handler)
    end_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)


def belongs_to_another() -> bool:
    """Whether ``STARTED_BY`` names this process's parent; its end (even by ``kill -9``) then sends a SIGTERM here."""
    parent = os.environ.pop(STARTED_BY, None)  # not inherited by what this process starts
    if parent is None:
        return False
    if sys.platform == "linux":
        # Where the system forbids this, the run trains on alone, and a restarted parent waits for its lock.
        end_with_parent(signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit(128 + signal.SIGTERM)  # the parent ended before the signal was requested
    return True
