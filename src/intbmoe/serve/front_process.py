"""A front's process, started as ``python -m intbmoe.serve.front_process SETTINGS LISTENER WHEN CONTROL``.

The supervisor starts it. It runs uvicorn on a socket that the supervisor opened, so a front that dies loses no
connection that it had not accepted yet. WHEN is ``at-once`` for the first fronts, which answer "not ready" until the
model is loaded, and ``when-ready`` for one that replaces another: connections wait for it. With ``when-chosen`` it is a
reserve: it has the sockets of all fronts, and is told which one to listen on when a front must be replaced.
"""

import asyncio
import gc
import importlib
import itertools
import logging
import os
import resource
import select
import socket
import sys
from typing import Any

import uvicorn
import uvloop

from intbmoe.serve.access import Access
from intbmoe.serve.background import Background
from intbmoe.serve.connection import Crowd, patient_protocol
from intbmoe.serve.decoder_process import fork_host
from intbmoe.serve.decoders import DecoderHost, Decoders
from intbmoe.serve.front import Front
from intbmoe.serve.links import Dispatcher, ServedVersion
from intbmoe.serve.messages import LONGEST_LINE, from_lines, reason, to_line
from intbmoe.serve.metrics import FrontMetrics
from intbmoe.serve.settings import Settings

LAME_S = 0.2  # between "not ready" and closing the port; answers in this time ask clients to reconnect
ALIVE_EVERY_S = 1.0
TOLD_S = 0.1  # so that a last message to the supervisor can leave this process
SPARE_FILES = 512  # besides clients' connections: connections beyond the limit that get a 503, engines, metrics
log = logging.getLogger(__name__)


class OtherVersionError(RuntimeError):
    """The artifact's folder holds a different version than the engines serve."""


class FrontProcess:
    def __init__(
        self, settings: Settings, listener: socket.socket | None, when: str, control: socket.socket, host: DecoderHost
    ) -> None:
        self._settings, self._host = settings, host
        self._when_ready = when != "at-once"
        self._ready, self._chosen = asyncio.Event(), asyncio.Event()
        if when != "when-chosen":
            self._chosen.set()
        self._listener, self._control = listener, control
        self._metrics = FrontMetrics()
        self._dispatcher = Dispatcher(self._metrics.retries.inc)
        self._access, self._with_keys = Access(settings), asyncio.Event()
        self._front = Front(settings, self._dispatcher, self._metrics, self._reload, self._access)
        self._crowd = Crowd(settings.address_connections or max(1, settings.connections // 2))
        self._loader = importlib.import_module(settings.loader)
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count(1)
        self._reloads: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._prepared: ServedVersion | None = None
        self._opening = asyncio.Lock()
        self._background = Background()
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._front.app(),
                http=patient_protocol(settings.patience_s, self._crowd),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                limit_concurrency=settings.connections,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            )
        )

    async def run(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._control, limit=LONGEST_LINE)
        listening = asyncio.create_task(self._obey(reader))
        breathing = asyncio.create_task(self._say_alive())
        if self._when_ready:
            await self._ready.wait()
        if self._access.with_key:
            await self._with_keys.wait()
        await self._chosen.wait()
        if not self._front.draining:
            await self._server.serve(sockets=[self._listener])
        listening.cancel()
        breathing.cancel()

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        async for message in from_lines(reader):
            if message["do"] in ("prepare", "serve"):
                self._background.start(self._change(message))
            elif message["do"] == "abandon":
                self._background.start(self._abandon(message["number"]))
            elif message["do"] == "listen":
                self._listener = socket.socket(fileno=message["listener"])
                self._chosen.set()
            elif message["do"] == "keys":
                self._access.keys = [key.encode("latin-1") for key in message["keys"]]
                self._with_keys.set()
            elif message["do"] == "drain":
                self._background.start(self._drain())
            elif message["do"] == "reloaded":
                waiting = self._reloads.pop(message["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        os._exit(1)  # the supervisor is gone

    async def _say_alive(self) -> None:
        while True:
            self._tell({"event": "alive"})
            self._front.tell_memory()
            await asyncio.sleep(ALIVE_EVERY_S)

    async def _change(self, wanted: dict[str, Any]) -> None:
        """Prepare or serve the version that the supervisor describes, and report back."""
        number = wanted["number"]
        try:
            served = await self._served(wanted)
            if wanted["do"] == "serve":
                self._serve(served)
        except Exception as error:
            log.exception("version %d cannot be served", number)
            other = isinstance(error, OtherVersionError)
            self._tell({"event": "cannot", "number": number, "why": reason(error), "other": other})
            if self._when_ready and not self._ready.is_set():
                await asyncio.sleep(TOLD_S)
                os._exit(1)  # it cannot answer anything; its replacement may
        else:
            self._tell({"event": "serving" if wanted["do"] == "serve" else "prepared", "number": number})

    def _serve(self, served: ServedVersion) -> None:
        current = self._dispatcher.current
        if current is None or served.number > current.number:
            self._dispatcher.switch(served)
            self._prepared = None if self._prepared is served else self._prepared
        elif served is not current:
            served.retire()  # a later version opened sooner: release the engines of this one
        if not self._ready.is_set():
            # All of this stays alive, and collecting garbage over it would take longer than many an answer.
            gc.collect()
            gc.freeze()
            self._ready.set()

    async def _served(self, wanted: dict[str, Any]) -> ServedVersion:
        """Return the version with that number, with links to its engines."""
        served = self._dispatcher.current
        if served is None or served.number != wanted["number"]:
            async with self._opening:
                if self._prepared is None or self._prepared.number != wanted["number"]:
                    opened = await asyncio.to_thread(self._loader.open_artifact, wanted["artifact"])
                    if opened.version != wanted["version"]:
                        raise OtherVersionError(
                            f"{wanted['artifact']} holds version {opened.version}, but {wanted['version']} is served"
                        )
                    decoders = None
                    if opened.encoder.untrusted:
                        count = self._settings.decoders
                        decoders = Decoders(self._host, wanted["number"], wanted["artifact"], opened, count)
                        await decoders.open()
                    self._prepared = ServedVersion(wanted["number"], opened, decoders)
                served = self._prepared
        for path in wanted["engines"]:
            try:
                await self._dispatcher.connect(served, path)
            except OSError as error:
                log.warning("engine %s cannot be reached: %s", path, error)
        # A front that replaces another serves even without an engine: 503 is better than no answer.
        expected = wanted["engines"] or wanted["do"] == "prepare"
        if expected and served is not self._dispatcher.current and served.least_loaded() is None:
            raise ConnectionError("none of its engines can be reached")
        return served

    async def _abandon(self, number: int) -> None:
        async with self._opening:
            if self._prepared is not None and self._prepared.number == number:
                self._prepared.retire()
                self._prepared = None

    async def _drain(self) -> None:
        self._front.draining = self._crowd.ending = True
        self._ready.set()
        self._with_keys.set()
        self._chosen.set()
        for waiting in self._reloads.values():  # a reload in progress is abandoned
            if not waiting.done():
                waiting.set_result({"ok": False, "why": "the server is shutting down"})
        await asyncio.sleep(LAME_S)
        # Connections that are not accepted yet must still be answered.
        while self._listener is not None and select.select([self._listener], [], [], 0)[0]:
            await asyncio.sleep(0.01)
        self._server.should_exit = True

    async def _reload(self) -> dict[str, Any]:
        number = next(self._numbers)
        waiting = self._reloads[number] = asyncio.get_running_loop().create_future()
        self._tell({"event": "reload", "id": number})
        return await waiting

    def _tell(self, message: dict[str, Any]) -> None:
        self._writer.write(to_line(message))


def allow_files(count: int) -> None:
    """Raise the limit on open files to ``count``: every connection is a file, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    if soft == endless or soft >= count:
        return
    most = count if hard == endless else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < count:
        log.warning("only %d files can be open, %d are needed: raise ulimit -n, or lower --connections", most, count)


def main(args: list[str]) -> None:
    settings = Settings.from_json(args[0])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s front %(process)d: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # Fork before there are threads and connections; without its host a front must end.
    host = DecoderHost(fork_host(settings.loader), lambda: os._exit(1))
    allow_files(settings.connections + SPARE_FILES)

    async def run() -> None:
        control = socket.socket(fileno=int(args[3]))
        listener = None if args[2] == "when-chosen" else socket.socket(fileno=int(args[1]))
        await FrontProcess(settings, listener, args[2], control, host).run()

    uvloop.run(run())
    logging.shutdown()
    os._exit(0)  # shutting down an interpreter with torch takes seconds


if __name__ == "__main__":
    main(sys.argv[1:])
