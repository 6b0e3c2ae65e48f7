"""Request bodies: read within a time and a size, and bounded in what those of a front take together."""

import asyncio
from collections.abc import Mapping

from starlette.requests import Request

from intbmoe.serve.responses import JSON, HttpError

CLOSE = {"connection": "close"}
"""What is left unread of a request that came too slowly would be waited for."""
DIGITS = 18
"""A longer number of bytes is too large whatever the limit."""


class BodyMemory:
    """How many bytes of bodies there are, from the moment that a request announces them until it has ended."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def take(self, size: int) -> None:
        """Refuses, with 429, what would be too much."""
        if self.held + size > self.most:
            message = f"too many requests: their bodies take {self.held} of {self.most} bytes"
            raise HttpError(429, message, outcome="refused", headers={"retry-after": "1"})
        self.held += size

    def give_back(self, size: int) -> None:
        """A request has ended."""
        self.held -= size


class Share:
    """What one request holds of a front's ``BodyMemory``; to be given back when the request has ended."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._size = 0

    def hold(self, size: int) -> None:
        """``size`` bytes in all are held from now on, or the request is refused."""
        if size > self._size:
            self._memory.take(size - self._size)
            self._size = size

    def give_back(self) -> None:
        """Nothing is held any more."""
        size, self._size = self._size, 0
        self._memory.give_back(size)


async def read_body(
    request: Request, headers: Mapping[str, str], share: Share, *, most: int, patience_s: float
) -> bytes:
    """The body, or the error that a client gets in its place.

    What is too much is refused as soon as that is known: by the length that the request announces, before any of it is
    read, or else while it arrives. What still comes then is passed over by the connection (``connection.py``).
    """
    if headers.get("content-type", JSON).partition(";")[0].strip().lower() != JSON:
        raise HttpError(415, f"a request is JSON: send 'Content-Type: {JSON}'", outcome="bad")
    length = headers.get("content-length", "0")
    announced = int(length) if length.isdecimal() and len(length) <= DIGITS else most + 1
    _require_size(announced, most)
    share.hold(announced)
    parts, size = [], 0
    try:
        async with asyncio.timeout(patience_s):
            async for part in request.stream():
                size += len(part)
                _require_size(size, most)
                share.hold(size)
                parts.append(part)
    except TimeoutError:
        message = f"the request did not arrive within {patience_s:g} s"
        raise HttpError(408, message, outcome="too_slow", headers=CLOSE) from None
    return b"".join(parts)


def _require_size(size: int, most: int) -> None:
    if size > most:
        raise HttpError(413, f"the request is larger than the {most} bytes allowed", outcome="too_large")
