"""HTTP input and output: request bodies read within limits, JSON answers, helpful errors, streamed text."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class HttpError(Exception):
    """An error answer; ``outcome`` is its name in the metrics."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        outcome: str,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.outcome, self.headers = status, outcome, dict(headers or {})
        self.content = {"status": status, "message": message, **({} if field is None else {"field": field})}

    def response(self) -> Response:
        return json_response({"error": self.content}, self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(ENCODER.encode(content).encode(), status, headers, media_type=JSON)


class TextStream(Response):
    """A text sent piece by piece: as server-sent events or, if the client asks for it, one JSON object per line."""

    def __init__(self, events: AsyncIterator[tuple[str, Any]], as_lines: bool, patience_s: float) -> None:
        super().__init__(headers={"cache-control": "no-store"}, media_type=LINES if as_lines else EVENTS)
        del self.headers["content-length"]
        self._events, self._as_lines, self._patience_s = events, as_lines, patience_s
        self._ending = ExitStack()

    def at_end(self, work: Callable[[], None]) -> None:
        """Do ``work`` when the text has ended, for whatever reason; the last added runs first."""
        self._ending.callback(work)

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for name, content in self._events:
                body = self._format(name, content)
                async with asyncio.timeout(self._patience_s):  # a client that does not read is cut off
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            return  # without sending an end, so that the connection is closed
        finally:
            self._ending.close()

    def _format(self, name: str, content: Any) -> bytes:
        if self._as_lines:
            return json.dumps({name: content}, ensure_ascii=False).encode() + b"\n"
        return f"event: {name}\ndata: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


class BodyMemory:
    """The total size of request bodies in a front, each from when its length is announced until the request ends."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0


class Share:
    """One request's part of ``BodyMemory``, given back when the request ends."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory, self._size = memory, 0

    def hold(self, size: int) -> None:
        """Hold ``size`` bytes in total from now on, or refuse the request."""
        more = max(0, size - self._size)
        if more and self._memory.held + more > self._memory.most:
            message = f"too many requests: their bodies take {self._memory.held} of {self._memory.most} bytes"
            raise HttpError(429, message, outcome="refused", headers={"retry-after": "1"})
        self._memory.held += more
        self._size += more

    def give_back(self) -> None:
        self._memory.held -= self._size
        self._size = 0


async def read_body(
    request: Request, headers: Mapping[str, str], share: Share, *, most: int, patience_s: float
) -> bytes:
    """Read the body, or raise ``HttpError``.

    A body that is too large is refused as soon as that is known: from the announced length, before any of it is read,
    or while it arrives. The connection discards the rest (``connection.py``).
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise HttpError(415, f"requests must be JSON: send 'Content-Type: {JSON}'", outcome="bad")
    length = headers.get("content-length", "0")
    # A number with more than 18 digits is too large whatever the limit.
    announced = int(length) if length.isdecimal() and len(length) <= 18 else most + 1
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
        # Close the connection, so that nothing waits for the rest.
        raise HttpError(408, message, outcome="too_slow", headers={"connection": "close"}) from None
    return b"".join(parts)


def _require_size(size: int, most: int) -> None:
    if size > most:
        raise HttpError(413, f"the request is larger than the {most} bytes allowed", outcome="too_large")
