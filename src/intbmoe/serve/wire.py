"""Messages between fronts and engines: msgpack, one after another. Nothing that can hold code.

front → engine   [ASK, id, deadline, request, stream, sent]    [CANCEL, id]
engine → front   [ANSWER, id, answer]    [PIECE, id, text, finished]    [EXPIRED, id]    [FAILED, id, message]
                 [REFUSED, id, reason, retry after]            [BAD, id, field, message]

A request is what ``intbmoe.tasks.serving.requests.to_wire`` makes of it. Deadlines, and when a
request was sent, are on the machine's monotonic clock, which its processes share.
"""

from typing import Any

import msgpack

ASK, CANCEL, ANSWER, PIECE, REFUSED, EXPIRED, BAD, FAILED = range(8)
LARGEST = 256 * 1024 * 1024


def pack(*message: Any) -> bytes:
    """One message as bytes."""
    return msgpack.packb(message)


def unpacker() -> msgpack.Unpacker:
    """Feed it what arrives, iterate over the messages that are complete."""
    return msgpack.Unpacker(max_buffer_size=LARGEST)
