"""Messages between the processes of a server.

**Between fronts and engines**, over Unix sockets: a stream of msgpack messages, which cannot carry code.

front → engine   [ASK, id, deadline, request, stream, sent]    [CANCEL, id]
engine → front   [ANSWER, id, answer]    [PIECE, id, text, finished]    [EXPIRED, id]    [FAILED, id, message]
                 [REFUSED, id, reason, retry after]            [BAD, id, field, message]

A request has the form that ``intbmoe.tasks.serving.requests.to_wire`` gives it. Deadlines and sending times are on the
machine's monotonic clock, which all processes share.

**Between the supervisor and each of its processes**, over a socket pair: lines of JSON. The process inherits its end as
a file descriptor. When the supervisor is gone, for whatever reason, the socket closes and the process exits, so nothing
is left behind.

supervisor → engine   {"do": "drain"}
engine → supervisor   {"event": "ready", "version": …}   {"event": "broken", "why": …}   {"event": "alive"}
supervisor → front    {"do": "prepare", "number": n, "artifact": …, "version": …, "engines": [path, …]}
                      {"do": "serve", and the same}   {"do": "abandon", "number": n}
                      {"do": "drain"}   {"do": "reloaded", "id": n, "ok": …, …}   {"do": "keys", "keys": [key, …]}
                      {"do": "listen", "listener": file descriptor}
front → supervisor    {"event": "prepared", "number": n}   {"event": "serving", "number": n}
                      {"event": "cannot", "number": n, "why": …, "other": true if the folder holds another version}
                      {"event": "reload", "id": n}   {"event": "alive"}

Every front prepares a new version before any of them serves it: if one refuses it, none has answered with it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgpack

ASK, CANCEL, PIECE = "ask", "cancel", "piece"
ANSWER, REFUSED, EXPIRED, BAD, FAILED = "answered", "refused", "expired", "bad", "failed"  # how a request ended
LARGEST_MESSAGE = 256 * 1024 * 1024
LONGEST_LINE = 1024 * 1024
OWN = ("intbmoe", "__main__")
"""Modules that define this program's errors; the module that a process is started with is its ``__main__``."""


def pack(*message: Any) -> bytes:
    return msgpack.packb(message)


def unpacker() -> msgpack.Unpacker:
    """Feed it what arrives, and iterate over the complete messages."""
    return msgpack.Unpacker(max_buffer_size=LARGEST_MESSAGE)


class Receiver(asyncio.Protocol):
    """One end of a connection that carries msgpack; ``receive`` gets each message."""

    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self._unpacker = transport, unpacker()

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for message in self._unpacker:
            self.receive(*message)


def to_line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def from_lines(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield messages until the other side is gone, which may have left some of ours unread."""
    with suppress(ConnectionError):
        while (line := await reader.readline()).endswith(b"\n"):
            yield json.loads(line)


def reason(error: Exception) -> str:
    """Return the text of ``why``: our own errors explain themselves, for others the type says more than the message."""
    own = type(error).__module__.partition(".")[0] in OWN
    return (str(error) if own else f"{type(error).__name__}: {error}")[:2000]
