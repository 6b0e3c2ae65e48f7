"""Which requests a front takes on: those that will be answered before their deadlines, as far as it can know.

The front does not ask why requests take long. Decoders, engines, its own event loop and a busy machine all count,
because it measures whole requests: a request that finds ``n`` others inside takes about ``n + 1`` times as long as one
request does on average. Under overload, which is when it matters, that is so: nearly all of a request's time is spent
waiting for those ahead of it. With fewer inside the estimate is rough, but corrects itself: when requests are faster
than expected, more are let in.
"""

import math
import time
from collections.abc import Callable

from intbmoe.serve.http import HttpError

SURE = 0.85  # share of the time left in which a request must be expected to end, so that few are given up half-way
FORGET_S = 1.0  # what happened so long ago counts a third of what happens now
Leave = Callable[..., None]  # called with ``teaches=``


class Door:
    """The requests inside, and how long those took that have left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside = 0
        self._seconds = self._shares = 0.0  # sums over those who have left, recent ones counting most
        self._learned = clock()

    def expected_seconds(self) -> float:
        """How long a request takes that comes now; zero if nobody is inside, so that a wrong estimate is corrected."""
        return (self._inside + 1) * self._seconds / self._shares if self._inside and self._shares else 0.0

    def enter(self) -> Leave:
        """Let a request in. Whoever first calls what is returned says whether it shows how long requests take."""
        self._inside += 1
        number, entered, inside = self._inside, self._clock(), True  # itself and those that it found inside

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
        message = f"too many requests: the wait of about {wait:.3f} s is too long for the {max(left, 0):.3f} s it has"
        raise HttpError(429, message, outcome="refused", headers={"retry-after": str(max(1, round(wait + 0.5)))})
