"""A process that the supervisor started, with the line to it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from intbmoe.serve.control import Lines, to_line

READ = 65_536
Tell = Callable[["Child", dict[str, Any]], None]


class Child:
    """``python -m MODULE ARGUMENTS… CONTROL`` in a session of its own; ``on_event`` gets what it says."""

    def __init__(self, process: asyncio.subprocess.Process, line: socket.socket) -> None:
        self.process = process
        self.started = time.monotonic()
        self.heard = time.monotonic()
        """When it last said anything."""
        self._line = line
        self._writer: asyncio.StreamWriter | None = None
        self.ended: asyncio.Task[int] | None = None

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: dict[str, str] | None = None,
        on_event: Tell,
    ) -> "Child":
        """Start the process; Ctrl-C in a terminal reaches the supervisor alone."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # files of the folder it is started in are not taken for modules
                "-m",
                module,
                *arguments,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        child = cls(process, ours)
        reader, child._writer = await asyncio.open_connection(sock=ours)
        child.ended = asyncio.create_task(child._listen(reader, on_event))
        return child

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.ended is not None and not self.ended.done()

    def tell(self, message: dict[str, Any]) -> None:
        """Send it a message."""
        if self.is_running:
            self._writer.write(to_line(message))

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    async def end(self, seconds: float) -> None:
        """Wait for its end, and bring it about when it takes longer."""
        done, _ = await asyncio.wait({self.ended}, timeout=seconds)
        if not done:
            self.kill()
            await asyncio.wait({self.ended})

    async def _listen(self, reader: asyncio.StreamReader, on_event: Tell) -> int:
        lines = Lines()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ):
                self.heard = time.monotonic()
                for message in lines.feed(data):
                    on_event(self, message)
        self._writer.close()
        # A process that closed its line without ending is not one of ours any more.
        try:
            return await asyncio.wait_for(self.process.wait(), 5)
        except TimeoutError:
            self.kill()
            return await self.process.wait()
