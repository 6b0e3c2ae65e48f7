"""Which requests are computed together, and when: a bounded queue with a token budget and deadlines.

Nothing here waits, sends or computes: a process calls ``submit``, ``cancel`` and ``take``, and tells ``cost`` how long
a batch took. Every request ends exactly once: refused by ``submit``, cancelled, or expired or taken by ``take``.

Requests are taken in order of arrival, as soon as the model is free. While it computes, the next batch gathers, so
batches grow with the load and an idle server answers at once. A batch costs as much as its padded rectangle (requests ×
longest). It is limited to what can be computed in half the latency budget, because a request may have to wait for one
batch before it is in the next.
"""

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

FORGET = 0.97  # the weight that earlier batches keep when a new one is added


@dataclass(frozen=True)
class Ticket:
    key: Hashable
    tokens: int
    deadline: float
    encoded: Any = None
    streamed: bool = False  # whether the client gets the text piece by piece
    arrived: float = 0.0


@dataclass(frozen=True)
class Refusal:
    reason: str
    retry_after: float


@dataclass
class Taken:
    batch: list[Ticket] = field(default_factory=list)
    expired: list[Ticket] = field(default_factory=list)

    @property
    def padded_tokens(self) -> int:
        return len(self.batch) * max((ticket.tokens for ticket in self.batch), default=0)


class CostModel:
    """Seconds ≈ fixed + slope · tokens, by least squares over all batches so far; recent ones count most."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of weights, tokens, seconds, tokens², tokens · seconds
        self._line: tuple[float, float] | None = (0.0, 0.0)

    def learn(self, tokens: float, seconds: float) -> None:
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [FORGET * old + one for old, one in zip(self._sums, new, strict=True)]
        self._line = None

    def line(self) -> tuple[float, float]:
        """Return fixed seconds and seconds per token, neither negative; zeros before anything is known."""
        if self._line is None:  # needed several times per request, changed once per batch
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        x, y, xx, xy = (total / self._sums[0] for total in self._sums[1:])
        variance = xx - x * x
        if variance <= 1e-9 * max(x * x, 1.0):  # only one size so far, so the fixed part is unknown
            return 0.0, y / max(x, 1.0)
        slope = min(max((xy - x * y) / variance, 0.0), y / x)
        return y - slope * x, slope

    def seconds(self, tokens: float) -> float:
        fixed, slope = self.line()
        return fixed + slope * tokens

    def tokens_within(self, seconds: float) -> float:
        fixed, slope = self.line()
        return max(0.0, (seconds - fixed) / slope) if slope > 0 else math.inf


class Batcher:
    """A bounded queue in order of arrival; ``clock`` gives the time, in the seconds used for deadlines."""

    def __init__(
        self, *, budget_s: float, batch_tokens: int, queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget_s, self.batch_tokens, self.queue = budget_s, batch_tokens, queue
        self.cost = CostModel()  # of a whole batch
        self.step_cost = self.cost
        """Of the part that the next batch has to wait for: for texts, written step by step, only the first step."""
        self._clock = clock
        self._waiting: dict[Hashable, Ticket] = {}  # in order of arrival
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether one more request would miss the next batch, or be refused."""
        return len(self) >= self.queue or self._tokens >= self._most_tokens()

    def waiting(self) -> list[Hashable]:
        return list(self._waiting)

    def submit(self, ticket: Ticket) -> Refusal | None:
        """Accept the request (None), or say why it is refused."""
        if ticket.key in self._waiting:
            raise ValueError(f"a request with the key {ticket.key!r} is already waiting")
        wait = self.expected_wait()
        if len(self._waiting) >= self.queue:
            return Refusal(f"{len(self._waiting)} requests are waiting, which is the limit", wait)
        left = ticket.deadline - self._clock()
        if left <= 0:
            return Refusal("its deadline has passed", wait)
        if self._waiting and wait + self.cost.seconds(ticket.tokens) > left:
            # It would expire in the queue and only take up time. An empty queue always accepts, so that a wrong
            # estimate corrects itself.
            return Refusal(f"the wait of about {wait:.3f} s is longer than the {left:.3f} s it has left", wait)
        self._waiting[ticket.key] = ticket
        self._tokens += ticket.tokens
        return None

    def cancel(self, key: Hashable) -> bool:
        """Remove a waiting request; False if it is no longer waiting."""
        ticket = self._waiting.pop(key, None)
        if ticket is not None:
            self._tokens -= ticket.tokens
        return ticket is not None

    def take(self, requests: int | None = None) -> Taken:
        """Take the next batch in order of arrival, with at most ``requests``; also return those that have expired."""
        now, most, longest = self._clock(), self._most_tokens(), 0
        taken = Taken()
        for ticket in list(self._waiting.values()):
            if ticket.deadline <= now:
                taken.expired.append(ticket)
                continue
            longest = max(longest, ticket.tokens)
            if len(taken.batch) == requests or (taken.batch and (len(taken.batch) + 1) * longest > most):
                break
            taken.batch.append(ticket)
        for ticket in (*taken.batch, *taken.expired):
            self.cancel(ticket.key)
        return taken

    def expected_wait(self) -> float:
        """Estimate how long the waiting requests will keep the model busy."""
        if not self._waiting:
            return 0.0
        most, batches = self._most_tokens(), len(self._waiting)  # a request larger than ``most`` is a batch by itself
        if self._tokens < most * batches:
            batches = math.ceil(self._tokens / most)
        fixed, slope = self.cost.line()
        return batches * fixed + slope * self._tokens

    def _most_tokens(self) -> float:
        # If the fixed part already takes half the budget, smaller batches would cost throughput and save no time.
        seconds = max(self.budget_s / 2, 2 * self.step_cost.line()[0])
        return min(self.batch_tokens, self.step_cost.tokens_within(seconds))
