"""How a training is asked to end: by Ctrl-C or SIGTERM, or because the process that started it has ended."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STARTED_BY = "INTBMOE_STARTED_BY"  # the environment variable that tells a training which process it belongs to


class StopRequest:
    """``with StopRequest(tell) as stop: … stop.signum``: end after the step. A second signal does not wait."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._before: dict[int, Any] = {}
        self.signum = 0  # the signal that came; 0 for none

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be changed
            asked = (signal.SIGINT, signal.SIGTERM)
            self._before = {signum: signal.signal(signum, self._receive) for signum in asked}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, signum: int, _: FrameType | None) -> None:
        self.signum = signum
        self._restore()
        self._tell(f"{signal.Signals(signum).name}: finishing the step and saving; once more ends at once")

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}


def belongs_to_another() -> bool:
    """Whether ``STARTED_BY`` names this process's parent, whose end (even by ``kill -9``) is then a SIGTERM to it."""
    parent = os.environ.pop(STARTED_BY, None)  # what this process starts is its own
    if parent is None:
        return False
    if sys.platform == "linux":
        # Where it is forbidden the run trains on alone, and who starts it again waits for its lock.
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != int(parent):
            sys.exit(128 + signal.SIGTERM)  # it ended before the signal was asked for
    return True
