"""Ctrl-C and SIGTERM ask for an end after the step; a second one does not wait."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopRequest:
    """``with StopRequest(tell) as stop: … stop.signum``. Outside the main thread signals are left as they are."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._before: dict[int, Any] = {}
        self.signum = 0
        """The signal that came; 0 for none."""

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._receive) for signum in self.SIGNALS}
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
