"""Which requests a front accepts: those that will be answered before their deadlines, as far as it can tell.

The front does not ask why requests take long. Decoders, engines, its own event loop and a busy machine all count,
because it measures whole requests: a request that finds ``n`` others inside takes about ``n + 1`` times as long as one
request does on average. That holds under overload, when it matters: nearly all of a request's time is spent waiting for
those ahead of it. With fewer inside the estimate is rough, but it corrects itself: when requests are faster than
expected, more are let in.
"""

import math
import time
from collections.abc import Callable

from intbmoe.serve.http import HttpError

SURE = 0.85  # a request must be expected to end within this share of its time left, so that few are abandoned half-way
FORGET_S = 1.0  # what happened this long ago counts a third as much as what happens now
Leave = Callable[..., None]  # called with ``teaches=``


class Door:
    """Tracks the requests inside, and how long those that have left took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside = 0
        self._seconds = self._shares = 0.0  # sums over requests that have left; recent ones count most
        self._learned = clock()

    def expected_seconds(self) -> float:
        """Estimate how long a new request takes; zero if none is inside, so that a wrong estimate is corrected."""
        return (self._inside + 1) * self._seconds / self._shares if self._inside and self._shares else 0.0

    def enter(self) -> Leave:
        """Let a request in; the returned function lets it out, and is told whether its time should be learned from."""
        self._inside += 1
        number, entered, inside = self._inside, self._clock(), True  # the number includes the request itself

        def leave(*, teaches: bool) -> None:
            nonlocal inside
            if not inside:
                return
            inside = False
            self._inside -= 1
            if teaches:
                now = self._clock()
                kept, self._learned = math.exp((self._learned - now) / FORGET_S), now
                self._seconds = kept * self._seconds + now - entered
                self._shares = kept * self._shares + number

        return leave


def refuse_late(wait: float, left: float) -> None:
    """Refuse a request that is expected to end after its deadline."""
    if wait > SURE * left:
        message = f"too many requests: the wait of about {wait:.3f} s is too long for the {max(left, 0):.3f} s left"
        raise HttpError(429, message, outcome="refused", headers={"retry-after": str(max(1, round(wait + 0.5)))})
