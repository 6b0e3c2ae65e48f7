"""JSON lines between the supervisor and each of its processes, over a socket pair.

The process's end is a file descriptor it inherits. When the supervisor is gone, however it ended, the line closes, and
the process ends too: nothing is left behind.

supervisor → engine   {"do": "drain"}
engine → supervisor   {"event": "ready", "version": …}   {"event": "broken", "why": …}   {"event": "alive"}
supervisor → front    {"do": "prepare", "number": n, "artifact": …, "version": …, "engines": [path, …]}
                      {"do": "serve", and the same}   {"do": "abandon", "number": n}
                      {"do": "drain"}   {"do": "reloaded", "id": n, "ok": …, …}
front → supervisor    {"event": "prepared", "number": n}   {"event": "serving", "number": n}
                      {"event": "cannot", "number": n, "why": …, "other": true if the folder holds another version}
                      {"event": "reload", "id": n}   {"event": "alive"}

A new version is prepared by every front before any of them serves it: what one refuses, none has answered with.
"""

import json
import socket
from typing import Any

LONGEST = 1024 * 1024
OWN = ("intbmoe", "__main__")
"""Where this program's errors are defined; the module that a process is started with is its ``__main__``."""


def to_line(message: dict[str, Any]) -> bytes:
    """One message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def reason(error: Exception) -> str:
    """``why`` something cannot be: our own errors explain themselves, of others the kind says more than the message."""
    own = type(error).__module__.partition(".")[0] in OWN
    return (str(error) if own else f"{type(error).__name__}: {error}")[:2000]


class Lines:
    """Messages out of whatever pieces they arrive in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete with ``data``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise ValueError(f"a control message is longer than {LONGEST} bytes")
        return [json.loads(line) for line in lines if line]


def inherited_socket(descriptor: int) -> socket.socket:
    """The process's end of the line."""
    return socket.socket(fileno=descriptor)
