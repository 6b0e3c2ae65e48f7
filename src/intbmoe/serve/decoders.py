"""A front's decoders: processes that encode untrusted requests within a budget, and are replaced when it is used up.

Requests that may take long to encode have one decoder of their own, at low priority, so that the others never wait for
them. A request that cannot be encoded before its deadline is refused at once.
"""

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgpack

from intbmoe.serve.background import Background
from intbmoe.serve.bodies import Prepared
from intbmoe.serve.decoder_process import BAD, ENCODED, HEAVY, READY
from intbmoe.serve.door import refuse_late
from intbmoe.serve.http import HttpError
from intbmoe.serve.loading import Opened
from intbmoe.serve.messages import Receiver

HEAVY_BODY = 2**20  # even parsing a larger body takes long
START_S = 60.0
WALL_S = 30.0  # a decoder that is silent for this long has been stopped or swapped out, and is killed
RETRY_S = 1.0  # before trying again to start a decoder that could not be started
KEPT = 0.9  # the weight of earlier requests in the mean time per request
Reply = asyncio.Future[tuple[Any, ...] | None]  # a decoder's message about one body; None if the decoder ended


class DecoderHost:
    """The process that forks decoders; ``on_end`` is called if it is gone."""

    def __init__(self, control: socket.socket, on_end: Callable[[], None]) -> None:
        self._control, self._on_end = control, on_end
        self._numbers = itertools.count(1)

    def fork(self, number: int, artifact: str, version: str, heavy: bool) -> tuple[int, socket.socket]:
        """Start a decoder; return its id and a socket to it, which closes if it cannot be started."""
        ours, theirs = socket.socketpair()
        name = next(self._numbers)
        wanted = {"fork": name, "number": number, "artifact": artifact, "version": version, "heavy": heavy}
        with theirs:
            self._tell(wanted, [theirs.fileno()])
        return name, ours

    def kill(self, name: int) -> None:
        self._tell({"kill": name}, [])

    def _tell(self, message: dict[str, Any], handed: list[int]) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], handed)
        except OSError:
            self._on_end()


def spawned_host(loader: str, on_end: Callable[[], None]) -> DecoderHost:
    """Start a host for a process that has threads, which cannot use ``decoder_process.fork_host``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", "-m", "intbmoe.serve.decoder_process", loader, str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
    return DecoderHost(ours, on_end)


class _Decoder(Receiver):
    def __init__(self, lane: "_Lane", name: int) -> None:
        self._lane, self.name = lane, name
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.job: Reply | None = None  # the reply to what it is encoding
        self._started = 0.0
        self._limit: asyncio.TimerHandle | None = None

    def start(self, body: bytes, job: Reply) -> None:
        self.job, self._started = job, time.monotonic()
        self._limit = asyncio.get_running_loop().call_later(WALL_S, self._lane.host.kill, self.name)
        self.transport.write(msgpack.packb(body))

    def receive(self, *message: Any) -> None:
        if message[0] == READY:
            self.ready.set_result(None)
        else:
            self._end(message)
        self._lane.free(self)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConnectionError("a decoder process could not be started: see the log"))
            self.ready.exception()  # mark as retrieved: perhaps nothing is waiting for it
        self._end(None)
        self._lane.lost(self)

    def _end(self, message: tuple[Any, ...] | None) -> None:
        """Pass on the decoder's message; None means that the process has ended."""
        if self.job is not None:
            job, self.job = self.job, None
            self._limit.cancel()
            self._lane.learn(time.monotonic() - self._started)
            if not job.done():
                job.set_result(message)


class _Lane:
    """Requests in order of arrival, and the decoders that take them."""

    def __init__(
        self, host: DecoderHost, count: int, heavy: bool, fork: Callable[[], tuple[int, socket.socket]]
    ) -> None:
        self.host, self._count, self._heavy, self._fork = host, count, heavy, fork
        self._waiting: dict[Reply, bytes] = {}  # bodies, in order of arrival
        self._all: set[_Decoder] = set()
        self._idle: list[_Decoder] = []
        self._mean = 0.0
        self._closed = False
        self._replacing = Background()

    async def open(self) -> None:
        decoders = [await self._add() for _ in range(self._count)]
        async with asyncio.timeout(START_S):
            for decoder in decoders:
                await decoder.ready

    async def _add(self, pause: float = 0.0) -> _Decoder:
        await asyncio.sleep(pause)
        name, line = self._fork()
        loop = asyncio.get_running_loop()
        _, decoder = await loop.create_unix_connection(lambda: _Decoder(self, name), sock=line)
        self._all.add(decoder)
        return decoder

    def expected_wait(self) -> float:
        """Estimate how long a new request takes; zero if a decoder is free, so that a wrong estimate is corrected."""
        if self._idle:
            return 0.0
        return self._mean * (1 + (len(self._waiting) + 1) / self._count)

    async def encode(self, body: bytes, deadline: float) -> tuple[Any, ...] | None:
        """Return what a decoder replies about ``body``; None if the decoder ended."""
        refuse_late(self.expected_wait(), deadline - time.monotonic())
        job: Reply = asyncio.get_running_loop().create_future()
        self._waiting[job] = body
        self._next()
        try:
            return await job
        except asyncio.CancelledError:  # the client no longer waits
            self._waiting.pop(job, None)
            for decoder in self._all:
                if self._heavy and decoder.job is job:  # a light decoder finishes before it could be replaced
                    self.host.kill(decoder.name)
            raise

    def free(self, decoder: _Decoder) -> None:
        self._idle.append(decoder)
        self._next()
        self._end_idle()

    def _next(self) -> None:
        while self._idle and self._waiting:
            job = next(iter(self._waiting))
            self._idle.pop().start(self._waiting.pop(job), job)

    def learn(self, seconds: float) -> None:
        self._mean = seconds if self._mean == 0 else KEPT * self._mean + (1 - KEPT) * seconds

    def lost(self, decoder: _Decoder) -> None:
        self._all.discard(decoder)
        if decoder in self._idle:
            self._idle.remove(decoder)
        if not self._closed or self._waiting:
            self._replacing.start(self._add(RETRY_S if decoder.ready.exception() else 0.0))

    def close(self) -> None:
        self._closed = True
        self._end_idle()

    def _end_idle(self) -> None:
        if self._closed:
            for decoder in self._idle:
                decoder.transport.close()


class Decoders:
    """The decoders of one version, started by ``open`` or by the first request."""

    def __init__(self, host: DecoderHost, number: int, artifact: str, opened: Opened, count: int) -> None:
        def lane(count: int, heavy: bool) -> _Lane:
            return _Lane(host, count, heavy, lambda: host.fork(number, artifact, opened.version, heavy))

        self._light, self._heavy = lane(count, False), lane(1, True)
        self._opening: asyncio.Future | None = None

    async def open(self) -> None:
        if self._opening is None:
            self._opening = asyncio.gather(self._light.open(), self._heavy.open())
        await asyncio.shield(self._opening)

    async def encode(self, body: bytes, deadline: float, step_aside: Callable[[], None] = lambda: None) -> Prepared:
        """Encode a body or raise ``HttpError``; cancel it if its client leaves. Heavy ones call ``step_aside``."""
        await self.open()
        reply = (HEAVY,) if len(body) > HEAVY_BODY else await self._light.encode(body, deadline)
        if reply is not None and reply[0] == HEAVY:
            step_aside()
            reply = await self._heavy.encode(body, deadline)
        if reply is None:
            message = "this request costs more to decode than its size justifies: save the image again, and smaller"
            raise HttpError(422, message, field="body", outcome="bad")
        kind, *content = reply
        if kind == BAD:
            status, message, field = content
            raise HttpError(status, message, field=field, outcome="bad")
        assert kind == ENCODED, kind
        return Prepared(*content)

    def close(self) -> None:
        """End the processes once all requests have been encoded."""
        self._light.close()
        self._heavy.close()
