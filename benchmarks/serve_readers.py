"""The clients of ``serve_texts.py``, which read streamed texts and record when tokens arrive."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import httptools

END = {"done": {"finished": "length"}}


@dataclass(frozen=True)
class Written:
    """A text as its reader saw it, in seconds."""

    tokens: int
    first: float
    """From the request to the first token."""
    each: float
    """From one token to the next, on average."""


class Reader(asyncio.Protocol):
    """One client, which sends the next request as soon as a text has ended, until there is none."""

    def __init__(self, requests: deque[bytes], written: list[Written]) -> None:
        self._requests, self._written = requests, written
        self._parser = httptools.HttpResponseParser(self)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self._fail(f"a connection was lost: {error or 'the server closed it'}")

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, part: bytes) -> None:
        """Called when the parser has read a part of an answer."""
        self._last = time.perf_counter()
        if not self._body:
            self._first = self._last
        self._body += part

    def on_message_complete(self) -> None:
        """Called when the parser has read a complete answer."""
        status, *lines = self._parser.get_status_code(), *self._body.decode().splitlines()
        if status != 200 or not lines or json.loads(lines[-1]) != END:
            self._fail(f"the server answers {status}: {self._body[-300:]!r}")
            return
        tokens = len("".join(json.loads(line)["text"] for line in lines[:-1]).split())
        later = (self._last - self._first) / max(1, tokens - 1)
        self._written.append(Written(tokens, self._first - self._asked, later))
        self._ask()

    def _ask(self) -> None:
        if not self._requests:
            self.ended.set_result(None)
            self._transport.close()
            return
        self._body, self._asked = bytearray(), time.perf_counter()
        self._transport.write(self._requests.popleft())

    def _fail(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(why))


async def read_texts(port: int, clients: int, requests: Sequence[bytes]) -> tuple[list[Written], float]:
    """Returns all texts, read by this many clients at a time, and the seconds that it took."""
    loop, waiting, written = asyncio.get_running_loop(), deque(requests), []
    started = time.perf_counter()
    pairs = [await loop.create_connection(lambda: Reader(waiting, written), "127.0.0.1", port) for _ in range(clients)]
    try:
        await asyncio.gather(*(reader.ended for _, reader in pairs))
        return written, time.perf_counter() - started
    finally:
        for transport, _ in pairs:
            transport.close()
