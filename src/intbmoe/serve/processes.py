"""What the supervisor starts: a process with a socket to it, and the engines of one version, which it keeps running."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from intbmoe.serve.messages import LONGEST_LINE, from_lines, to_line
from intbmoe.serve.metrics import FOLDER, forget_process
from intbmoe.serve.settings import Settings

WATCH_S = 1.0
Tell = Callable[["Child", dict[str, Any]], None]
START_S = 900.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
log = logging.getLogger(__name__)


class Child:
    """``python -m MODULE ARGUMENTS… CONTROL`` in a session of its own; ``on_event`` gets its messages."""

    def __init__(self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        self.process, self._writer = process, writer
        self.started = time.monotonic()
        self.heard: float | None = None  # when its last message came
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # gives the version it serves
        self.ended: asyncio.Task[int] | None = None

    @classmethod
    async def start(
        cls, command: Sequence[str], folder: Path, threads: int, on_event: Tell, pass_fds: Sequence[int] = ()
    ) -> "Child":
        """Start the process, with its metrics in ``folder``; Ctrl-C in a terminal reaches only the supervisor."""
        # Without this limit, numeric libraries would use all cores in each process.
        environment = {FOLDER: str(folder), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # do not import modules from the current folder
                "-m",
                *command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
        child = cls(process, writer)
        child.ended = asyncio.create_task(child._listen(reader, on_event))
        return child

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.ended is not None and not self.ended.done()

    @property
    def is_ready(self) -> bool:
        return self.is_running and self.ready.done() and self.ready.exception() is None

    def tell(self, message: dict[str, Any]) -> None:
        if self.is_running:
            self._writer.write(to_line(message))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    async def watch(self, hang_s: float) -> int:
        """Wait for its end and return its status; kill it if it is silent for ``hang_s`` after its first message."""
        while self.is_running:
            await asyncio.wait({self.ended}, timeout=WATCH_S)  # unlike wait_for, this does not cancel ``ended``
            if self.is_running and self.heard is not None and time.monotonic() - self.heard > hang_s:
                log.error("process %d has been silent for %g s: killed", self.pid, hang_s)
                self.kill()
                await asyncio.wait({self.ended})
        return self.ended.result()

    async def end(self, seconds: float) -> None:
        done, _ = await asyncio.wait({self.ended}, timeout=seconds)
        if not done:
            self.kill()
            await asyncio.wait({self.ended})

    async def _listen(self, reader: asyncio.StreamReader, on_event: Tell) -> int:
        try:
            async for message in from_lines(reader):
                self.heard = time.monotonic()
                on_event(self, message)
        except Exception:  # a message we cannot read must not keep ``ended`` from finishing
            log.exception("process %d sent something unreadable: killed", self.pid)
            self.kill()
        self._writer.close()
        # A process that has closed its socket should be ending.
        try:
            return await asyncio.wait_for(self.process.wait(), 5)
        except TimeoutError:
            self.kill()
            return await self.process.wait()


class StartError(RuntimeError):
    """An engine did not become ready; the message comes from the engine."""


class EngineGroup:
    """The engines of one version, with sockets in ``folder``.

    ``on_change`` is called when an engine starts or ends; ``on_other`` starts a reload when the artifact's folder holds
    a different version.
    """

    def __init__(
        self,
        number: int,
        artifact: str,
        settings: Settings,
        folder: Path,
        on_change: Callable[["EngineGroup"], None],
        on_other: Callable[[], asyncio.Task],
    ) -> None:
        self.number, self.artifact, self.version = number, artifact, ""
        self._settings, self._folder, self._on_change, self._on_other = settings, folder, on_change, on_other
        self._paths: dict[Child, str] = {}
        self._keepers: list[asyncio.Task] = []
        self._started = 0

    def describe(self) -> dict[str, Any]:
        """Tell fronts what is served, and the sockets of the engines that are ready."""
        ready = [path for child, path in self._paths.items() if child.is_ready]
        return {"number": self.number, "artifact": self.artifact, "version": self.version, "engines": ready}

    async def start(self) -> None:
        """Start all engines and keep them running; raises ``StartError`` unless all become ready."""
        results = await asyncio.gather(
            *(self._start_one() for _ in range(self._settings.workers)), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            await self.kill()
            raise failed[0]
        versions = {child.ready.result() for child in results}
        if len(versions) > 1:
            await self.kill()
            raise StartError(f"{self.artifact} changed while it was being loaded: reload again")
        self.version = versions.pop()
        self._keepers = [asyncio.create_task(self._keep(child)) for child in results]

    async def drain(self, seconds: float) -> None:
        """Let every engine finish its requests; fronts already send new ones elsewhere."""
        for keeper in self._keepers:
            keeper.cancel()
        children = list(self._paths)
        for child in children:
            if child.is_ready:
                child.tell({"do": "drain"})
            else:
                child.kill()  # still starting: it has no requests
        await asyncio.gather(*(child.end(seconds) for child in children))
        for child in children:
            self._forget(child)

    async def kill(self) -> None:
        for child in list(self._paths):
            child.kill()
        await self.drain(5)

    async def _start_one(self) -> Child:
        self._started += 1
        path = str(self._folder / f"{self.number}.{self._started}")
        command = ["intbmoe.serve.engine_process", self._settings.to_json(), self.artifact, path]
        child = await Child.start(command, self._folder, self._settings.engine_threads(), self._hear)
        self._paths[child] = path
        await asyncio.wait({child.ready, child.ended}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if child.is_ready:
            return child
        child.kill()
        await asyncio.wait({child.ended})
        self._forget(child)
        ended = f"an engine ended with status {child.ended.result()}"
        if not child.ready.done():
            raise StartError(f"{ended}, or was not ready after {START_S:g} s")
        raise child.ready.exception() or StartError(f"{ended} as soon as it was ready")

    def _hear(self, child: Child, message: dict[str, Any]) -> None:
        if message["event"] == "ready":
            child.ready.set_result(message["version"])
        elif message["event"] == "broken":
            child.ready.set_exception(StartError(message["why"]))

    async def _keep(self, child: Child) -> None:
        pause = FIRST_PAUSE_S
        while True:
            status = await child.watch(self._settings.hang_s)
            log.error("engine %d ended with status %s: starting another", child.pid, status)
            pause = FIRST_PAUSE_S if time.monotonic() - child.started > LONGEST_PAUSE_S else pause
            self._forget(child)
            self._on_change(self)
            child = None
            while child is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                child = await self._start_again()
            self._on_change(self)

    async def _start_again(self) -> Child | None:
        """Return an engine that serves the same version as the others, or None."""
        try:
            child = await self._start_one()
        except (StartError, OSError) as error:
            log.error("an engine could not be restarted: %s", error)
            return None
        if child.ready.result() == self.version:
            return child
        log.error("%s holds a different version than the one served: reloading", self.artifact)
        child.kill()
        self._forget(child)
        await asyncio.wait({self._on_other()})  # if the reload succeeds, these engines are drained; if not, try again
        return None

    def _forget(self, child: Child) -> None:
        path = self._paths.pop(child, None)
        if path is not None:
            Path(path).unlink(missing_ok=True)
            forget_process(child.pid, self._folder)
