"""Engine and front in one process, for hosts that manage processes themselves, such as Ray Serve.

The HTTP application is the front's; the engine runs in a thread instead of behind a socket.
"""

import asyncio
import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette

from intbmoe.serve.access import Access
from intbmoe.serve.decoders import Decoders, spawned_host
from intbmoe.serve.engine import Engine, Reply, warm_up
from intbmoe.serve.front import Front
from intbmoe.serve.links import Dispatcher, Line, Outcome, ServedVersion
from intbmoe.serve.metrics import EngineMetrics, FrontMetrics
from intbmoe.serve.settings import Settings

LAST_ANSWERS_S = 1.0  # time for answering the clients of an engine that died
log = logging.getLogger(__name__)


class ThreadLine(Line):
    """A line to an engine in a thread, which ends with the application."""

    def __init__(self, engine: Engine, on_death: Callable[[], None]) -> None:
        super().__init__()
        self._engine, self._on_death = engine, on_death
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._step_began: float | None = None  # None while it waits for requests
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def check(self, hang_s: float) -> None:
        """Raise unless the engine can answer."""
        if not self.is_open:
            raise RuntimeError("the engine has ended")
        began = self._step_began
        if began is not None and time.monotonic() - began > hang_s:
            raise RuntimeError(f"the engine has computed one batch for more than {hang_s:g} s: it hangs")

    def _post(self, *message: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox.put(message)

    def _run(self) -> None:
        try:
            while True:
                replies = [] if self._engine.busy else self._engine.receive(*self._inbox.get())
                while not self._inbox.empty():
                    replies += self._engine.receive(*self._inbox.get())
                if self._engine.busy:
                    self._step_began = time.monotonic()
                    replies += self._engine.step()
                    self._step_began = None
                self._hand_over(self._deliver_all, replies)
        except Exception:
            log.exception("the engine has ended and answers nothing more: restart this process")
            self.is_open = False  # before clients are told: requests that arrive meanwhile must find it closed
            self._hand_over(self._end_all)

    def _hand_over(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # if it is, the clients are gone
                raise

    def _deliver_all(self, replies: list[Reply]) -> None:
        for reply in replies:
            self.deliver(reply.kind, reply.key, *reply.content)

    def _end_all(self) -> None:
        for call in list(self._calls.values()):
            call.finish(Outcome("unavailable", ("the engine that had this request died",)))
        self._loop.call_later(LAST_ANSWERS_S, self._on_death)


def build_app(settings: Settings, on_death: Callable[[], None] = lambda: None) -> Starlette:
    """Return the whole server as one ASGI application, with its model loaded, checked and warm.

    If an engine fails, for example with its GPU, it cannot be restarted in the same process: from then on
    ``/health/ready`` says so, and ``on_death`` is called. The application's ``state`` has the ``version`` it serves and
    ``check_health()``, which raises if the engine has failed or hangs.
    """
    settings.check()
    opened = importlib.import_module(settings.loader).open_artifact(settings.artifact, settings.device)
    metrics = FrontMetrics()
    engine = Engine(opened.encoder, settings, EngineMetrics(opened.version, metrics.registry))
    warm_up(engine, opened.golden)
    decoders = None
    if opened.encoder.untrusted:
        host = spawned_host(settings.loader, on_death)
        decoders = Decoders(host, 1, settings.artifact, opened, settings.decoders)
    served = ServedVersion(1, opened, decoders)
    line = served.links["thread"] = ThreadLine(engine, on_death)
    dispatcher = Dispatcher()
    dispatcher.switch(served)
    app = Front(settings, dispatcher, metrics, _no_reload, Access(settings, settings.api_keys())).app()
    app.state.version, app.state.check_health = opened.version, lambda: line.check(settings.hang_s)
    return app


async def _no_reload() -> dict[str, Any]:
    return {"ok": False, "why": "this server does not reload itself: deploy it again"}
