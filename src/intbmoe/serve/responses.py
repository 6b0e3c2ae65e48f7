"""What goes back over HTTP: JSON, errors that say what to do, and text as it is written."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class HttpError(Exception):
    """A request that is not answered; ``outcome`` is how metrics call it."""

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
        self.status = status
        self.outcome = outcome
        self.content = {"status": status, "message": message, **({} if field is None else {"field": field})}
        self.headers = dict(headers or {})

    def response(self) -> Response:
        return json_response({"error": self.content}, self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``content`` as JSON."""
    return Response(ENCODER.encode(content).encode(), status, headers, media_type=JSON)


class TextStream(Response):
    """Pieces as they come: server-sent events, or a JSON object a line where the client asked for that."""

    def __init__(self, events: AsyncIterator[tuple[str, Any]], as_lines: bool, patience_s: float) -> None:
        super().__init__(headers={"cache-control": "no-store"}, media_type=LINES if as_lines else EVENTS)
        del self.headers["content-length"]
        self._events = events
        self._as_lines = as_lines
        self._patience_s = patience_s
        self._ending = ExitStack()

    def at_end(self, work: Callable[[], None]) -> None:
        """Have ``work`` done when the text has ended, in whatever way; what was given last is done first."""
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
            return  # without an end, so that the connection is closed
        finally:
            self._ending.close()

    def _format(self, name: str, content: Any) -> bytes:
        if self._as_lines:
            return json.dumps({name: content}, ensure_ascii=False).encode() + b"\n"
        return f"event: {name}\ndata: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
