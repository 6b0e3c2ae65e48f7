"""Engine and front in one process, for those who bring processes of their own, as Ray Serve does.

The HTTP application is the front's; the engine runs in a thread instead of behind a socket.
"""

import asyncio
import importlib
import queue
import threading
from typing import Any

from starlette.applications import Starlette

from intbmoe.serve import wire
from intbmoe.serve.engine import Engine, Reply
from intbmoe.serve.front import Front
from intbmoe.serve.links import Dispatcher, Generation, Line
from intbmoe.serve.metrics import EngineMetrics, FrontMetrics
from intbmoe.serve.settings import Settings
from intbmoe.serve.warm_up import warm_up


class ThreadLine(Line):
    """The way to an engine in a thread of this process."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    @property
    def is_open(self) -> bool:
        return True

    def retire(self) -> None:
        """There is no connection to close: the thread ends with the application."""

    def _post(self, *message: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox.put(message)

    def _run(self) -> None:
        while True:
            replies = [] if self._engine.busy else self._receive(*self._inbox.get())
            while not self._inbox.empty():
                replies += self._receive(*self._inbox.get())
            if self._engine.busy:
                replies += self._engine.step()
            try:
                self._loop.call_soon_threadsafe(self._deliver_all, replies)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
                return  # whoever asked is gone, and with the loop the whole application

    def _receive(self, kind: int, number: int, *content: Any) -> list[Reply]:
        if kind == wire.CANCEL:
            self._engine.cancel(number)
            return []
        refusal = self._engine.submit(number, *content)
        return [] if refusal is None else [refusal]

    def _deliver_all(self, replies: list[Reply]) -> None:
        for reply in replies:
            self.deliver(reply.kind, reply.key, *reply.content)


def build_app(settings: Settings) -> Starlette:
    """The whole server as one ASGI application, its model loaded, checked and warm."""
    settings.check()
    opened = importlib.import_module(settings.loader).open_predictor(settings.artifact, settings.device)
    metrics = FrontMetrics()
    engine = Engine(opened.encoder, settings, EngineMetrics(opened.version, metrics.registry))
    warm_up(engine, opened.golden)
    generation = Generation(1, opened)
    generation.links["thread"] = ThreadLine(engine)
    dispatcher = Dispatcher()
    dispatcher.switch(generation)
    return Front(settings, dispatcher, metrics, _no_reload).app()


async def _no_reload() -> dict[str, Any]:
    return {"ok": False, "why": "this server is deployed anew by whoever started it: it does not reload itself"}
