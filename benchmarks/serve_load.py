"""An open-loop load generator for HTTP/1.1: it sends a request when it is due, whether others were answered or not.

**Latency** counts from the moment when a request was due. A server that stalls, a generator that is late and a wait for
a free connection all show in the latency of every request that was due during that time, even if it was sent late.

**Arrivals** are a Poisson process or evenly spaced, fixed by a seed before the first is sent.

**Clients** are processes of this file (``python serve_load.py REQUESTS``), started by ``serve_clients.py`` for a whole
benchmark: each gets a ``Load`` as a line of JSON and answers with a line of figures. Connections are kept alive and
used in turn, so that the load spreads over all processes that listen on a port.

**Lateness** of the generator is measured too: how long after its due time a request was handled. Timers count in
milliseconds, so it is normally about half a millisecond. It is part of the latency.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import math
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httptools

TICK_S = 0.001
NO_ANSWER = "no answer"
NO_CONNECTION = "no connection"
LOST = "connection lost"
NOT_HTTP = "not HTTP"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of one client."""

    port: int
    rate: float
    """Requests per second."""
    seconds: float
    """How long requests are measured."""
    warm_s: float = 0.0
    """How long requests are sent before that without being measured."""
    arrivals: Literal["poisson", "fixed"] = "poisson"
    seed: int = 0
    start: float = 0.0
    """Earliest due time, on the machine's monotonic clock."""
    phase: float = 0.0
    """For evenly spaced arrivals: the delay of the first after ``start``, as a fraction of a gap."""
    connections: int = 64
    """Opened beforehand."""
    most_connections: int = 512
    patience_s: float = 2.0
    """How long to wait for answers after the last request was due."""


def due_times(load: Load) -> list[float]:
    """Returns the due times of requests, in seconds from ``start``."""
    total = load.warm_s + load.seconds
    if load.arrivals == "fixed":
        return [(number + load.phase) / load.rate for number in range(math.ceil(total * load.rate - load.phase))]
    generator = random.Random(load.seed)
    gaps = iter(lambda: generator.expovariate(load.rate), None)
    return list(itertools.takewhile(lambda due: due < total, itertools.accumulate(gaps)))


def post(path: str, body: bytes, *headers: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    )
    return "\r\n".join([*head, "", ""]).encode() + body


class Connection(asyncio.Protocol):
    """A connection that has one request at a time."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.asked: int | None = None
        """The number of the pending request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def ask(self, number: int, request: bytes) -> None:
        self.asked = number
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(NOT_HTTP)
            self._transport.close()

    def on_message_complete(self) -> None:
        """Called when the parser has read a complete answer."""
        self._end(str(self._parser.get_status_code()))
        if self._parser.should_keep_alive():
            self._client.take_back(self)
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(LOST)
        self._client.forget(self)

    def close(self) -> None:
        """Closes the connection and gives up on its pending request."""
        self.asked = None
        self._transport.close()

    def _end(self, outcome: str) -> None:
        number, self.asked = self.asked, None
        if number is not None:
            self._client.record(number, outcome)


class Client:
    """Sends the requests of one ``Load``."""

    def __init__(self, load: Load, requests: Sequence[bytes]) -> None:
        self._load = load
        self._due = [load.start + due for due in due_times(load)]
        chooser = random.Random(load.seed + 1)
        self._requests = [chooser.choice(requests) for _ in self._due]
        self._lateness = [math.nan] * len(self._due)
        self._ended: list[tuple[str, float] | None] = [None] * len(self._due)
        self._left = len(self._due)
        self._done = asyncio.Event()
        self._unsent: deque[int] = deque()
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._opening: set[asyncio.Task] = set()
        self._waited_for_connection = 0

    async def run(self) -> dict[str, Any]:
        """Runs until all requests are answered or patience ends; returns the figures of the measured ones."""
        loop = asyncio.get_running_loop()
        for _ in range(self._load.connections):
            await self._connect(loop)
        used, begun = time.process_time(), time.monotonic()
        number = 0
        while number < len(self._due):
            now = time.monotonic()
            while number < len(self._due) and self._due[number] <= now:
                self._lateness[number] = now - self._due[number]
                self._unsent.append(number)
                number += 1
            self._send()
            if number < len(self._due):
                # At least one tick: not waiting at all would keep a core busy that the server may need.
                await asyncio.sleep(max(TICK_S, self._due[number] - time.monotonic()))
        busy = (time.process_time() - used) / max(time.monotonic() - begun, 1e-9)
        if self._left:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), self._load.patience_s)
        figures = self._figures() | {"busy": busy, "connections": len(self._open)}
        for task in self._opening:
            task.cancel()
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)
        return figures

    def record(self, number: int, outcome: str) -> None:
        """Records that a request has ended, with a status or a reason."""
        self._ended[number] = (outcome, time.monotonic())
        self._left -= 1
        if not self._left:
            self._done.set()

    def take_back(self, connection: Connection) -> None:
        self._idle.append(connection)
        self._send()

    def forget(self, connection: Connection) -> None:
        """Records that a connection has ended; another is opened when a request needs it."""
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _send(self) -> None:
        while self._unsent and self._idle:
            number = self._unsent.popleft()
            # Takes the connection that has been idle longest, so that all fronts get the same load.
            self._idle.popleft().ask(number, self._requests[number])
        room = self._load.most_connections - len(self._open) - len(self._opening)
        for _ in range(min(room, len(self._unsent) - len(self._opening))):
            self._waited_for_connection += 1
            task = asyncio.create_task(self._connect(asyncio.get_running_loop()))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            _, connection = await loop.create_connection(lambda: Connection(self), "127.0.0.1", self._load.port)
        except OSError:
            if self._unsent:
                self.record(self._unsent.popleft(), NO_CONNECTION)
            return
        self._open.add(connection)
        self.take_back(connection)

    def _figures(self) -> dict[str, Any]:
        first = self._load.start + self._load.warm_s
        end = first + self._load.seconds
        counted = [number for number, due in enumerate(self._due) if due >= first]
        latencies, errors = [], Counter()
        for number in counted:
            outcome, ended = self._ended[number] or (NO_ANSWER, math.nan)
            if outcome == "200":
                latencies.append(round(1e3 * (ended - self._due[number]), 3))
            else:
                errors[outcome] += 1
        return {
            "due": len(counted),
            "latencies_ms": latencies,
            "errors": dict(errors),
            "answered_in_window": sum(1 for one in self._ended if one and one[0] == "200" and first <= one[1] < end),
            "lateness_ms": [round(1e3 * self._lateness[number], 3) for number in counted],
            "waited_for_connection": self._waited_for_connection,
        }


def send(load: Load, requests: Sequence[bytes]) -> dict[str, Any]:
    try:
        import uvloop as loop
    except ModuleNotFoundError:
        loop = asyncio

    async def run() -> dict[str, Any]:
        return await Client(load, requests).run()

    return loop.run(run())


def main(requests: str) -> None:
    """Runs a client process, which reads a load per line and prints its figures as a line."""
    # Not sys.stdout: with PYTHONUNBUFFERED, it drops what does not fit into a full pipe.
    out = open(sys.stdout.fileno(), "w", closefd=False)  # noqa: SIM115
    content = json.loads(Path(requests).read_text())
    whole = [post(content["path"], body.encode()) for body in content["bodies"]]
    gc.disable()  # a collection would make requests late

    def say(figures: dict[str, Any]) -> None:
        print(json.dumps(figures), file=out, flush=True)

    say({})
    while line := sys.stdin.readline():
        say(send(Load(**json.loads(line)), whole))
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1])
