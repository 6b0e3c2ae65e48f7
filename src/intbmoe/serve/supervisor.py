"""The process that the user starts: it opens the port, starts fronts and engines, and keeps them running.

SIGTERM or Ctrl-C   drain: accept no new connection, answer requests in flight, then exit; twice: exit at once
SIGHUP              reload: read the keys again, and the artifact's folder, with new engines next to the old ones
SIGUSR1             read the keys again, and nothing else
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from intbmoe.files import private_folder
from intbmoe.serve.background import Background
from intbmoe.serve.messages import reason
from intbmoe.serve.metrics import forget_process
from intbmoe.serve.processes import FIRST_PAUSE_S, LONGEST_PAUSE_S, START_S, Child, EngineGroup, StartError
from intbmoe.serve.settings import Settings

BACKLOG = 2048
SPARE = -1  # in place of a listener's number
SPARE_AFTER_S = 10.0  # a spare front is started after the others
SO_ATTACH_FILTER = 26
# Load the flags and keep SYN and ACK; if only SYN is set, accept no byte of the packet, otherwise all of it.
DROP_SYN = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
LONGEST_PATH = 80
"""Of the private folder, in bytes: the path of a Unix socket may have 104 to 108, depending on the system."""
log = logging.getLogger(__name__)


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until a signal; raise ``StartError`` if the artifact cannot be served, ``OSError`` for the port."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    settings.check()
    with private_folder(Path(tempfile.gettempdir()), "intbmoe-", ".run") as folder:
        if len(os.fsencode(folder)) > LONGEST_PATH:
            where = f"the folder for temporary files, {str(folder.parent)!r},"
            raise OSError(f"{where} has too long a path for sockets: set TMPDIR to a shorter path, such as /tmp")
        asyncio.run(Supervisor(settings, folder, say).run())


class Supervisor:
    """Keeps fronts and engines running; ``folder`` holds the engines' sockets and the metrics of all processes."""

    def __init__(self, settings: Settings, folder: Path, say: Callable[[str], None]) -> None:
        self._settings, self._folder, self._say = settings, folder, say
        self._listeners: list[socket.socket] = []
        self._fronts: dict[int, Child] = {}  # by the number of their listener
        self._spare_taken = asyncio.Event()
        self._engines: EngineGroup | None = None
        self._engine_groups: weakref.WeakSet[EngineGroup] = weakref.WeakSet()  # including those starting or draining
        self._versions = 0
        self._reloading = asyncio.Lock()
        self._asked: int | None = None  # the version that fronts were told to prepare or serve
        self._answers: dict[Child, asyncio.Future[str | None]] = {}  # None if a front complied, else why it did not
        self._background = Background()
        self._stop: asyncio.Event | None = None
        self._ending = False
        self._keys: tuple[bytes, ...] = ()  # read once here, so that all fronts have the same, even if the file changes

    async def run(self) -> None:
        self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._receive_end)
        loop.add_signal_handler(signal.SIGHUP, self._receive_reload)
        loop.add_signal_handler(signal.SIGUSR1, self._read_keys)
        self._keys = self._settings.api_keys()
        self._listeners = open_listeners(self._settings.host, self._settings.port, self._settings.fronts)
        keepers = [asyncio.create_task(self._keep_front(number)) for number in range(self._settings.fronts)]
        if self._settings.spare:
            keepers.append(asyncio.create_task(self._keep_spare()))
        starting = asyncio.create_task(self._start_first())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                starting.result()
                self._introduce()
            await stopping
        except StartError:
            self._kill_fronts()  # no need to drain: nothing was answered yet
            raise
        finally:
            self._ending = True
            for task in (*keepers, starting, stopping):
                task.cancel()
            await self._end()

    def _introduce(self) -> None:
        host, port = self._settings.host, self._listeners[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self._say(f"serving {self._engines.version} on http://{shown}:{port} (process {os.getpid()})")
        if not self._settings.on_loopback and self._settings.api_key_file is None:
            log.warning("anyone who can reach %s can use this server: set --api-key-file to require a key", host)

    @property
    def _is_serving(self) -> bool:
        """Whether the engines of some version have become ready."""
        return self._engines is not None and bool(self._engines.version)

    async def _start_first(self) -> None:
        engines = self._engines = self._new_engines()
        async with self._reloading:  # fronts get one question at a time
            await engines.start()
            refusals = await self._ask_fronts("serve", engines)
        for child, why in refusals.items():
            if child.is_running:  # a front that died is replaced by one that starts with these engines
                raise StartError(f"{self._name(child)}: {why}")

    def _new_engines(self) -> EngineGroup:
        self._versions += 1
        # Resolve a link now, in case it is moved to another version: these engines stay with today's target.
        artifact, callbacks = os.path.realpath(self._settings.artifact), (self._engines_changed, self._start_reload)
        engines = EngineGroup(self._versions, artifact, self._settings, self._folder, *callbacks)
        self._engine_groups.add(engines)
        return engines

    def _engines_changed(self, engines: EngineGroup) -> None:
        if engines is self._engines:
            for child in self._fronts.values():
                self._tell_front(child)

    async def _keep_front(self, number: int) -> None:
        pause = FIRST_PAUSE_S
        while True:
            when = "when-ready" if self._is_serving else "at-once"
            child = self._take_spare(number) or await self._start_front(number, when)
            if child is not None:
                await self._watch_front(child)
                pause = FIRST_PAUSE_S if time.monotonic() - child.started > LONGEST_PAUSE_S else pause
                if self._spare_is_ready:
                    continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _keep_spare(self) -> None:
        """Keep a front that lacks only a socket: starting one takes seconds, in which clients would wait."""
        while True:
            await asyncio.sleep(SPARE_AFTER_S)
            child = await self._start_front(SPARE, "when-chosen")
            if child is not None:
                ends = [asyncio.create_task(end) for end in (self._watch_front(child), self._spare_taken.wait())]
                try:
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:  # also when the server stops: then the end of the spare is not worth a message
                    for end in ends:
                        end.cancel()
                self._spare_taken.clear()

    @property
    def _spare_is_ready(self) -> bool:
        spare = self._fronts.get(SPARE)
        return spare is not None and spare.is_ready

    def _take_spare(self, number: int) -> Child | None:
        if not self._spare_is_ready:
            return None
        child = self._fronts[number] = self._fronts.pop(SPARE)
        child.tell({"do": "listen", "listener": self._listeners[number].fileno()})
        self._spare_taken.set()
        return child

    async def _start_front(self, number: int, when: str) -> Child | None:
        listeners = [listener.fileno() for listener in self._listeners]
        handed = listeners if number == SPARE else [listeners[number]]
        command = ["intbmoe.serve.front_process", self._settings.to_json(), str(handed[0]), when]
        try:
            child = await Child.start(command, self._folder, 1, self._hear, pass_fds=handed)
        except OSError as error:
            log.error("a front could not be started: %s", error)
            return None
        self._fronts[number] = child
        self._tell_keys(child)
        self._tell_front(child)
        return child

    async def _watch_front(self, child: Child) -> None:
        status = await child.watch(self._settings.hang_s)
        forget_process(child.pid, self._folder)
        self._take_answer(child, f"it ended with status {status}")
        log.error("front %d ended with status %s: replacing it", child.pid, status)

    def _tell_front(self, child: Child) -> None:
        if self._is_serving:
            child.tell({"do": "serve", **self._engines.describe()})

    def _tell_keys(self, child: Child) -> None:
        child.tell({"do": "keys", "keys": [key.decode("latin-1") for key in self._keys]})

    def _receive_reload(self) -> None:
        self._read_keys()
        self._start_reload()

    def _start_reload(self) -> asyncio.Task:
        return self._background.start(self._reload_by_signal())

    def _read_keys(self) -> None:
        try:
            self._keys = self._settings.api_keys()
        except ValueError as error:
            log.error("keeping the old keys: %s", error)
            return
        for child in self._fronts.values():
            self._tell_keys(child)
        if self._settings.api_key_file is not None:
            log.info("%d keys are valid now", len(self._keys))

    def _hear(self, child: Child, message: dict[str, Any]) -> None:
        if message["event"] == "reload":
            self._background.start(self._reload_for(child, message["id"]))
        elif message["event"] in ("prepared", "serving", "cannot"):
            if message["event"] == "serving" and not child.ready.done():
                child.ready.set_result(self._engines.version)
            if message["number"] == self._asked:
                self._take_answer(child, message.get("why"))
            elif message.get("other"):
                log.error("%s holds a different version than the one served: reloading", self._engines.artifact)
                self._start_reload()

    def _take_answer(self, child: Child, why: str | None) -> None:
        answer = self._answers.get(child)
        if answer is not None and not answer.done():
            answer.set_result(why)

    async def _reload_for(self, child: Child, number: int) -> None:
        child.tell({"do": "reloaded", "id": number, **await self.reload()})

    async def _reload_by_signal(self) -> None:
        result = await self.reload()
        if result["ok"]:
            log.info("reloaded: serving %s, previously %s", result["version"], result["previous"])
        else:
            log.error("not reloaded, the old version keeps serving: %s", result["why"])

    async def reload(self) -> dict[str, Any]:
        """Serve what the artifact's folder holds now; if that fails, the old version keeps serving."""
        if self._reloading.locked() or not self._is_serving or self._ending:
            return {"ok": False, "why": "the server is starting, reloading or shutting down: try again later"}
        async with self._reloading:
            old, new = self._engines, self._new_engines()
            try:
                await new.start()
                # Every front opens the artifact and connects to its engines; none serves it until all are ready.
                for child, why in (await self._ask_fronts("prepare", new)).items():
                    raise StartError(f"{self._name(child)} cannot serve version {new.version}: {why}")
                self._engines = new  # no way back from here
                for child, why in (await self._ask_fronts("serve", new)).items():
                    log.error(
                        "%s did not switch and is killed; its replacement serves the new version: %s",
                        self._name(child),
                        why,
                    )
                    child.kill()
            except (StartError, OSError) as error:
                return {"ok": False, "why": f"version {old.version} keeps serving: {error}"}
            except Exception as error:  # the client is waiting for an answer
                log.exception("the reload failed")
                return {"ok": False, "why": f"version {old.version} keeps serving: {reason(error)}"}
            finally:
                if self._engines is not new:
                    for child in self._fronts.values():
                        child.tell({"do": "abandon", "number": new.number})
                    await new.kill()
            self._background.start(old.drain(max(self._settings.drain_s, self._settings.deadline_s(streams=True))))
            return {"ok": True, "version": new.version, "previous": old.version}

    async def _ask_fronts(self, do: str, engines: EngineGroup) -> dict[Child, str]:
        """Tell all fronts to prepare or serve the version of ``engines``; return the reasons of those that do not."""
        loop, running = asyncio.get_running_loop(), [child for child in self._fronts.values() if child.is_running]
        answers = self._answers = {child: loop.create_future() for child in running}
        self._asked = engines.number
        try:
            for child in running:
                child.tell({"do": do, **engines.describe()})
            if answers:
                await asyncio.wait(answers.values(), timeout=START_S)
        finally:
            self._asked, self._answers = None, {}
        late = f"it did not answer within {START_S:g} s"
        found = {child: answer.result() if answer.done() else late for child, answer in answers.items()}
        return {child: why for child, why in found.items() if why is not None}

    def _name(self, child: Child) -> str:
        numbers = [number for number, other in self._fronts.items() if other is child]
        which = "that is gone" if not numbers else "in reserve" if numbers == [SPARE] else numbers[0] + 1
        return f"front {which} (process {child.pid})"

    def _receive_end(self) -> None:
        if not self._stop.is_set():
            log.info("shutting down: answering requests under way; a second signal ends at once")
            self._stop.set()
            return
        self._kill_fronts()
        if self._engines is not None:
            self._background.start(self._engines.kill())

    def _kill_fronts(self) -> None:
        for child in self._fronts.values():
            child.kill()

    async def _end(self) -> None:
        for listener in self._listeners:
            refuse_new(listener)
            listener.close()
        for child in self._fronts.values():
            child.tell({"do": "drain"})
        await asyncio.gather(*(child.end(self._settings.drain_s + 5) for child in self._fronts.values()))
        if self._engines is not None:
            await self._engines.drain(5)
        # An engine that hangs would not notice that the supervisor is gone.
        await asyncio.gather(*(engines.kill() for engines in self._engine_groups if engines is not self._engines))
        for task in self._background:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._background, return_exceptions=True)


def refuse_new(listener: socket.socket) -> None:
    """Refuse new connections without losing any: closing the socket would reset those not accepted yet.

    A filter on the socket drops packets that begin a connection (SYN without ACK in the flags, byte 13 of the header).
    """
    if sys.platform != "linux":
        return
    program = b"".join(struct.pack("HBBI", *step) for step in DROP_SYN)
    memory = ctypes.create_string_buffer(program)
    filter_ = struct.pack("HP", len(DROP_SYN), ctypes.addressof(memory))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_)
    except OSError as error:
        log.warning("connections that begin while the server shuts down may be lost: %s", error)


def open_listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """Return ``count`` sockets on one port, over which the kernel distributes connections."""
    listeners: list[socket.socket] = []
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        options = {"family": family, "backlog": BACKLOG, "dualstack_ipv6": family == socket.AF_INET6}
        if count > 1:  # sockets that share a port would also share it with another server, so check that it is free
            socket.create_server(address, **options).close()
        for _ in range(count):
            listeners.append(socket.create_server(address, **options, reuse_port=count > 1))
            address = listeners[0].getsockname()  # all use the port that the system chose for the first
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error}; choose another with --host or --port") from error
    return listeners
