"""A front's connections to engines, and the requests on their way through them.

Call            one request; it ends exactly once, whoever ends it first
Link            the connection to one engine
ServedVersion   an artifact's encoder and the links to the engines that serve it
Dispatcher      the current version; sends calls, and sends them again when an engine dies
"""

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from intbmoe.serve import messages
from intbmoe.serve.background import Background
from intbmoe.serve.bodies import Prepared, most_values, prepare
from intbmoe.serve.decoders import Decoders
from intbmoe.serve.door import Door, Leave
from intbmoe.serve.http import HttpError
from intbmoe.serve.loading import Opened

MOST_SENDS = 2  # a request whose first two engines died is not sent to a third: it may be the cause
LARGE_BODY = 65_536  # from this size on a request is encoded in a thread
UNSENT_BYTES = 64 * 2**20
"""Limit on buffered requests that an engine has not read; they stay buffered even after their clients were answered."""


class Outcome(NamedTuple):
    """How a request ended: as the engine says (``messages.py``), or "unavailable" or "left"."""

    name: str
    content: tuple[Any, ...] = ()


EXPIRED = Outcome("expired")
LEFT = Outcome("left")


class Call:
    """One request. ``await call.done`` gives its ``Outcome``; a streamed text's pieces are in ``call.pieces``."""

    def __init__(self, body: bytes, deadline: float, leave: Leave | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.body, self.deadline, self._leave = body, deadline, leave or (lambda teaches: None)
        self.done: asyncio.Future[Outcome] = loop.create_future()
        self.pieces: asyncio.Queue[str | None] | None = None
        self.served: ServedVersion | None = None
        self.content = b""
        self.tokens = self.number = self.sends = 0
        self.link: Line | None = None
        self.received = 0  # characters of the text from the current engine
        self.passed_on = 0  # characters passed on to the client
        self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self.finish, EXPIRED)

    async def encode(self, served: "ServedVersion") -> None:
        """Check the request and prepare it for the engines of ``served``, or raise ``HttpError``.

        It stops at the deadline. A body that may take long is encoded outside the event loop, so others do not wait.
        """
        if served.decoders is not None:
            # A heavy request is encoded separately and says nothing about how long the others take.
            step_aside = partial(self._leave, teaches=False)
            encoding = asyncio.create_task(served.decoders.encode(self.body, self.deadline, step_aside))
        elif len(self.body) >= LARGE_BODY:
            encoding = asyncio.create_task(asyncio.to_thread(served.prepare, self.body))
        else:
            self._take(served, served.prepare(self.body))
            return
        try:
            await asyncio.wait({encoding, self.done}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            encoding.cancel()  # does nothing if it has ended
        if encoding.done():
            self._take(served, encoding.result())

    def _take(self, served: "ServedVersion", prepared: Prepared) -> None:
        if self.done.done():
            return  # it expired in the meantime
        self.served = served
        self.tokens, self.content, streamed = prepared
        if streamed and self.pieces is None:
            self.pieces = asyncio.Queue()

    def add_piece(self, text: str, finished: str | None) -> None:
        new = text[max(0, self.passed_on - self.received) :]
        self.received += len(text)
        self.passed_on = max(self.passed_on, self.received)
        if new and self.pieces is not None:
            self.pieces.put_nowait(new)
        if finished is not None:
            self.finish(Outcome("answered", ({"finished": finished},)))

    def finish(self, outcome: Outcome) -> None:
        """End the call if it has not ended, and tell an engine that is still working on it."""
        if self.done.done():
            return
        self._timer.cancel()
        self._leave(teaches=outcome.name in ("answered", "expired"))
        if self.link is not None:
            self.link.forget(self, tell=outcome.name in ("expired", "left"))
        self.done.set_result(outcome)
        if self.pieces is not None:
            self.pieces.put_nowait(None)


class Line(ABC):
    """The calls to one engine, whatever carries the messages: a socket, or a queue in the same process."""

    is_open = True
    has_room = True  # whether the engine reads what it is sent

    def __init__(self) -> None:
        self.load = 0  # tokens in flight
        self._given_up = 0  # of these, the tokens of calls that ended here since the engine last replied
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)

    @abstractmethod
    def _post(self, *message: Any) -> None: ...

    def retire(self) -> None:  # noqa: B027
        """Close when no call is in flight, if there is anything to close."""

    def send(self, call: Call) -> None:
        call.link, call.number = self, next(self._numbers)
        call.sends += 1
        self._calls[call.number] = call
        self.load += call.tokens
        self._post(messages.ASK, call.number, call.deadline, call.content, call.pieces is not None, time.monotonic())

    def forget(self, call: Call, *, tell: bool) -> None:
        """Drop a call that has ended here; ``tell`` the engine if it does not know."""
        if self._calls.pop(call.number, None) is None:
            return
        call.link = None
        if not tell:
            self.load -= call.tokens
            return
        # Calls to an engine that hangs expire. If that lowered its load, it would get most of the new calls.
        self._given_up += call.tokens
        if self.is_open:
            self._post(messages.CANCEL, call.number)

    def deliver(self, kind: str, number: int, *content: Any) -> None:
        self.load -= self._given_up
        self._given_up = 0
        call = self._calls.get(number)
        if call is None:  # it ended here in the meantime
            return
        if kind == messages.PIECE:
            call.add_piece(*content)
        else:
            call.finish(Outcome(kind, content))


class Link(Line, messages.Receiver):
    receive = Line.deliver

    def __init__(self, path: str, on_lost: Callable[["Link", list[Call]], None]) -> None:
        super().__init__()
        self.path, self._on_lost = path, on_lost
        self._retired = False

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def has_room(self) -> bool:
        return self.transport is not None and self.transport.get_write_buffer_size() < UNSENT_BYTES

    def _post(self, *message: Any) -> None:
        self.transport.write(messages.pack(*message))

    def forget(self, call: Call, *, tell: bool) -> None:
        super().forget(call, tell=tell)
        self._close_if_retired()

    def retire(self) -> None:
        self._retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._retired and not self._calls and self.transport is not None:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        calls = list(self._calls.values())
        self._calls.clear()
        self.load = self._given_up = 0
        for call in calls:
            call.link = None
        self._on_lost(self, calls)


class ServedVersion:
    def __init__(self, number: int, opened: Opened, decoders: Decoders | None = None) -> None:
        self.number, self.opened, self.decoders = number, opened, decoders
        self._most_values = most_values(opened.encoder.request_schema)
        self.links: dict[str, Line] = {}
        self.door = Door()
        self.connecting = asyncio.Lock()
        self._retired = False

    def prepare(self, body: bytes) -> Prepared:
        return prepare(self.opened.encoder, self._most_values, body)

    def add(self, path: str, link: Line) -> None:
        """Add an engine; if another version is serving by now, close its link again."""
        self.links[path] = link
        if self._retired:
            link.retire()

    def least_loaded(self) -> Line | None:
        return min((link for link in self.links.values() if link.is_open), key=lambda link: link.load, default=None)

    def retire(self) -> None:
        """Close each link when its calls have ended, because another version serves now."""
        self._retired = True
        for link in list(self.links.values()):
            link.retire()
        if self.decoders is not None:
            self.decoders.close()


class Dispatcher:
    def __init__(self, on_retry: Callable[[], None] = lambda: None) -> None:
        self.current: ServedVersion | None = None
        self._on_retry = on_retry
        self._encoding = Background()

    @property
    def ready(self) -> bool:
        return self.current is not None and self.current.least_loaded() is not None

    async def connect(self, served: ServedVersion, path: str) -> None:
        async with served.connecting:
            if path in served.links:
                return
            loop = asyncio.get_running_loop()
            _, link = await loop.create_unix_connection(lambda: Link(path, partial(self._lost, served)), path)
            if link.is_open:
                served.add(path, link)

    def switch(self, served: ServedVersion) -> None:
        """Send new requests to ``served``; the old version finishes its own."""
        before, self.current = self.current, served
        if before is not None:
            before.retire()

    def send(self, call: Call) -> None:
        """Send an encoded call; if no engine can take it, it ends here."""
        link = call.served.least_loaded()
        if link is None and call.served is not self.current and not call.passed_on:
            self._encoding.start(self._encode_again(call))
            return
        if link is None:
            call.finish(Outcome("unavailable", ("no engine is running at the moment",)))
        elif not link.has_room:
            call.finish(Outcome("refused", ("the engine has not read the requests before it", 1.0)))
        else:
            link.send(call)

    async def _encode_again(self, call: Call) -> None:
        """Encode the call for the current version, because its own version no longer has an engine."""
        try:
            await call.encode(self.current)
        except HttpError as error:  # the new model does not accept what the old one did
            call.finish(Outcome("bad", (error.content.get("field", "body"), error.content["message"])))
        if not call.done.done():
            self.send(call)

    def _lost(self, served: ServedVersion, link: Link, calls: list[Call]) -> None:
        if served.links.get(link.path) is link:
            del served.links[link.path]
        for call in calls:
            if call.sends >= MOST_SENDS:
                call.finish(Outcome("unavailable", ("the engines that had this request died",)))
                continue
            self._on_retry()
            call.received = 0  # the other engine writes the text again; what the client already has is skipped
            self.send(call)
