"""The engine's process, started as ``python -m intbmoe.serve.engine_process SETTINGS ARTIFACT SOCKET CONTROL``.

The supervisor starts it. It listens on a Unix socket for fronts, and computes whenever nothing is left to read. When
told to drain, it continues until every front has closed its connection, which a front does once all its requests have
been answered.
"""

import gc
import importlib
import logging
import os
import selectors
import socket
import sys
import time
from typing import Any

import torch

from intbmoe.serve import messages
from intbmoe.serve.engine import Engine, Reply, warm_up
from intbmoe.serve.messages import reason, to_line
from intbmoe.serve.metrics import EngineMetrics
from intbmoe.serve.settings import Settings

READ = 1024 * 1024
ALIVE_EVERY_S = 1.0
QUIET_S = 0.001  # how long to wait for the rest of a message
log = logging.getLogger(__name__)


class _Front:
    def __init__(self, connection: socket.socket, number: int) -> None:
        connection.setblocking(False)
        self.socket, self.number = connection, number
        self.unpacker = messages.unpacker()
        self.received = 0
        self.unsent = bytearray()


class EngineProcess:
    def __init__(self, engine: Engine, listener: socket.socket, control: socket.socket) -> None:
        self._engine, self._listener, self._control = engine, listener, control
        self._fronts: dict[int, _Front] = {}
        self._accepted = 0
        self._draining, self._supervised = False, True
        self._told_alive = 0.0
        self._selector = selectors.DefaultSelector()
        for source in (listener, control):
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ, source)

    def run(self) -> None:
        while self._supervised and not (self._draining and not self._fronts):
            self._listen(0 if self._engine.busy else ALIVE_EVERY_S / 2)
            self._gather()
            if self._engine.busy:
                self._send(self._engine.step())
            if time.monotonic() - self._told_alive >= ALIVE_EVERY_S:
                self._told_alive = time.monotonic()
                tell(self._control, {"event": "alive"})

    def _listen(self, seconds: float) -> bool:
        """Read what has arrived or arrives within ``seconds``; False if nothing did."""
        ready = self._selector.select(seconds)
        for key, events in ready:
            if key.data is self._listener:
                connection, _ = self._listener.accept()
                self._accepted += 1
                front = self._fronts[self._accepted] = _Front(connection, self._accepted)
                self._selector.register(connection, selectors.EVENT_READ, front)
            elif key.data is self._control:
                self._read_control()
            else:
                self._serve(key.data, events)
        return bool(ready)

    def _gather(self) -> None:
        """Read messages larger than a socket's buffer, which holds an image or two: a batch should have more."""
        batcher = self._engine.batcher
        end = time.monotonic() + 0.1 * batcher.budget_s
        while len(batcher) and not batcher.full and time.monotonic() < end:
            halfway = any(front.received > front.unpacker.tell() for front in self._fronts.values())
            if not halfway or not self._listen(QUIET_S):
                return

    def _read_control(self) -> None:
        try:
            data = self._control.recv(READ)
        except ConnectionError:  # the supervisor was killed before it had read everything
            data = b""
        self._supervised = bool(data)
        self._draining = self._draining or self._supervised  # "drain" is the only message an engine gets

    def _serve(self, front: _Front, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(front)
        if events & selectors.EVENT_READ and front.number in self._fronts:
            try:
                data = front.socket.recv(READ)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._lose(front)
                return
            front.received += len(data)
            front.unpacker.feed(data)
            for kind, number, *rest in front.unpacker:
                self._send(self._engine.receive(kind, (front.number, number), *rest))

    def _send(self, replies: list[Reply]) -> None:
        touched = {}
        for reply in replies:
            number, request = reply.key
            front = self._fronts.get(number)
            if front is not None:  # it may have left while the model computed
                front.unsent += messages.pack(reply.kind, request, *reply.content)
                touched[number] = front
        for front in touched.values():
            self._flush(front)

    def _flush(self, front: _Front) -> None:
        try:
            sent = front.socket.send(front.unsent)
            del front.unsent[:sent]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._lose(front)
            return
        waits = selectors.EVENT_READ | (selectors.EVENT_WRITE if front.unsent else 0)
        self._selector.modify(front.socket, waits, front)

    def _lose(self, front: _Front) -> None:
        """Cancel the requests of a front that has closed its connection."""
        if self._fronts.pop(front.number, None) is None:
            return
        self._selector.unregister(front.socket)
        front.socket.close()
        self._engine.cancel_all(lambda key: key[0] == front.number)


def tell(control: socket.socket, message: dict[str, Any]) -> None:
    """Send the supervisor a message; if it is gone, the next read will show that."""
    try:
        control.send(to_line(message))
    except (BlockingIOError, ConnectionError):
        log.debug("the supervisor could not be told %s", message)


def main(args: list[str]) -> None:
    settings, artifact, path = Settings.from_json(args[0]), args[1], args[2]
    control = socket.socket(fileno=int(args[3]))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine %(process)d: %(message)s")
    try:
        torch.set_num_threads(settings.engine_threads())
        torch.set_grad_enabled(False)
        opened = importlib.import_module(settings.loader).open_artifact(artifact, settings.device)
        engine = Engine(opened.encoder, settings, EngineMetrics(opened.version))
        warm_up(engine, opened.golden)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(256)
        # All of this stays alive, and collecting garbage over it would take longer than many a latency budget.
        gc.collect()
        gc.freeze()
    except Exception as error:
        log.debug("not started", exc_info=True)
        tell(control, {"event": "broken", "why": reason(error)})
        os._exit(1)
    tell(control, {"event": "ready", "version": opened.version})
    status = 0
    try:
        EngineProcess(engine, listener, control).run()
    except Exception:
        log.exception("the engine failed: its requests go to other engines")
        status = 1
    logging.shutdown()
    # Shutting down an interpreter with torch takes long, and the requests would wait meanwhile.
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
