"""A process that the supervisor started, with the line to it."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from intbmoe.serve.control import Lines, to_line

READ = 65_536
WATCH_S = 1.0
Tell = Callable[["Child", dict[str, Any]], None]
log = logging.getLogger(__name__)


class Child:
    """``python -m MODULE ARGUMENTS… CONTROL`` in a session of its own; ``on_event`` gets what it says."""

    def __init__(self, process: asyncio.subprocess.Process, line: socket.socket) -> None:
        self.process = process
        self.started = time.monotonic()
        self.heard: float | None = None
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

    async def watch(self, hang_s: float) -> int:
        """Its status, when it has ended; once it has spoken, a silence of ``hang_s`` ends it."""
        while self.is_running:
            await asyncio.wait({self.ended}, timeout=WATCH_S)  # to be cancelled without cancelling what it waits for
            if self.is_running and self.heard is not None and time.monotonic() - self.heard > hang_s:
                log.error("process %d has been silent for %g s: ended", self.pid, hang_s)
                self.kill()
                await asyncio.wait({self.ended})
        return self.ended.result()

    async def end(self, seconds: float) -> None:
        """Wait for its end, and bring it about when it takes longer."""
        done, _ = await asyncio.wait({self.ended}, timeout=seconds)
        if not done:
            self.kill()
            await asyncio.wait({self.ended})

    async def _listen(self, reader: asyncio.StreamReader, on_event: Tell) -> int:
        lines = Lines()
        try:
            while data := await reader.read(READ):
                self.heard = time.monotonic()
                for message in lines.feed(data):
                    on_event(self, message)
        except ConnectionError:
            pass
        except Exception:  # whoever waits for its end must learn of it, whatever it said
            log.exception("process %d was not understood: ended", self.pid)
            self.kill()
        self._writer.close()
        # A process that closed its line without ending is not one of ours any more.
        try:
            return await asyncio.wait_for(self.process.wait(), 5)
        except TimeoutError:
            self.kill()
            return await self.process.wait()
