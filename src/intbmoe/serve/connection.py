"""A client's connection: uvicorn's, with limits on the time and size of a request's head.

A request can be answered before all of it has arrived: because it is too large, has no key or asks for an unknown path.
Closing the connection at once would lose the answer, because the client is still sending. So the rest is discarded, up
to a limit in bytes and time, and the connection stays open.

A client that does not read its answer is cut off: a normal close would wait for it forever.

A client may close its own direction and wait for the answer. A client that has gone looks the same, so it is sent "100
Continue", which every client ignores, but which the operating system of a client that has gone answers with a reset.

When the limit on connections is reached, the one that has been idle longest makes room for a new one.

A client that was refused for overload is told to wait a second. If it asks again at once, refusing it over and over
takes time in which others could be answered. So refused connections are read again one after the other.
"""

import asyncio
import errno
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_BYTES = 65_536
LINGER_BYTES = 64 * 2**20  # how much of a request that is already answered is discarded
TOLD = 256  # connections beyond the limit that still get a 503; further ones are closed at once
PROBED_S = 0.005  # how long to wait for the reset of a client that has gone; doubled each time
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE = (b"connection", b"close")
REFUSAL_S = 0.002  # between reading one refused connection again and the next: refusing takes a tenth of that
RETRY_S = 1.0  # the longest time that a refused connection is not read; Retry-After is at least this long
SENT_AHEAD = 64  # pipelined requests that may wait for earlier answers; uvicorn itself has no limit


class Crowd:
    """What all connections of a front share: which are idle or refused, the count per address, and shutdown flags."""

    def __init__(self, per_address: int | None = None) -> None:
        self.per_address = per_address
        self.idle: dict[Any, None] = {}  # idle connections, the longest idle first
        self.by_address: Counter[str] = Counter()
        self.ending = False  # whether each answer is the last on its connection
        self.closing = False  # whether idle connections are closed
        self._refused_until = 0.0  # when the last refused connection is read again

    def seconds_unread(self, now: float) -> float:
        """Return how long a connection that is refused now stays unread."""
        self._refused_until = min(max(self._refused_until, now) + REFUSAL_S, now + RETRY_S)
        return self._refused_until - now


def patient_protocol(seconds: float, crowd: Crowd) -> type[HttpToolsProtocol]:
    """Give a client ``seconds`` for a request's head, for the rest of an answered request, and to read some answer."""

    class Patient(HttpToolsProtocol):
        _refusal = ""
        _address: str | None = None
        _limit: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _later: asyncio.TimerHandle | None = None
        _bytes = 0  # of this head, or discarded
        _in_body = _half_closed = _refused = False
        _answered: Any = None  # the request being answered; uvicorn's ``cycle`` is the last one received

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._start()
            crowd.idle[self] = None
            if self.client is not None:
                self._address = self.client[0]
                crowd.by_address[self._address] += 1
            self._limit_number()

        def _limit_number(self) -> None:
            most, mine = crowd.per_address, crowd.by_address[self._address]
            if most is not None and mine > most:
                self.limit_concurrency, too_many = 0, mine - most  # uvicorn answers its request with 503
            elif self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
                longest = next(iter(crowd.idle))
                if longest is not self:
                    longest.leave()
                too_many = len(self.connections) - self.limit_concurrency
            else:
                return
            if too_many >= TOLD:
                self.transport.abort()

        def leave(self) -> None:
            """Close an idle connection, unless a request has just arrived."""
            crowd.idle.pop(self, None)
            if not self._has_unread():
                self.connections.discard(self)
                self._close()

        def _has_unread(self) -> bool:
            """Whether the client has sent something that has not been read yet."""
            with suppress(OSError):
                line = socket.socket(fileno=self.transport.get_extra_info("socket").fileno())
                try:
                    return bool(line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
                finally:
                    line.detach()
            return False

        def data_received(self, data: bytes) -> None:
            crowd.idle.pop(self, None)
            if self._limit is None and (self.cycle is None or self.cycle.response_complete):
                self._start()
            if self._limit is not None or not self._in_body:
                self._bytes += len(data)
            super().data_received(data)
            if self.transport.is_closing():
                return
            if self._in_body:
                if self._limit is not None and self._bytes > LINGER_BYTES:
                    self._close()
            elif self._bytes > HEADERS_BYTES:
                self.send_400_response(f"The head of the request is longer than {HEADERS_BYTES} bytes.")

        def eof_received(self) -> bool:
            """Whether to keep the connection: the client may have closed its own direction only."""
            if not self._is_busy or self._in_body:
                return False
            if not self.cycle.response_started and self.scope["http_version"] == "1.1":
                self.transport.write(CONTINUE)
                self._look_for_reset(PROBED_S)
            self._half_closed = True
            return True

        def _look_for_reset(self, pause: float) -> None:
            if self.transport.is_closing() or not self._is_busy:
                return
            line = self.transport.get_extra_info("socket")
            if line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.ECONNRESET, errno.EPIPE):
                self.transport.abort()
            else:
                self.loop.call_later(pause, self._look_for_reset, 2 * pause)

        @property
        def _is_busy(self) -> bool:
            """Whether a request is being answered."""
            return self.cycle is not None and not self.cycle.response_complete

        def shutdown(self) -> None:
            """Shut the connection down once everything received, in whole or in part, has been answered."""
            crowd.closing = True
            if not self._is_busy and not self._bytes:
                self.leave()

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._answered = cycle
            super()._start_asgi_task(cycle, self._watching_heads(app))

        def _watching_heads(self, app: Any) -> Any:
            async def watching(scope: Any, receive: Any, send: Any) -> None:
                async def send_watched(message: Any) -> None:
                    if message["type"] == "http.response.start":
                        self._refused = message["status"] == 429
                        if crowd.ending and not self.pipeline:  # this is the last answer on this connection
                            message = {**message, "headers": [*message["headers"], CLOSE]}
                    await send(message)

                await app(scope, receive, send_watched)

            return watching

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.pipeline and not self._is_busy and not self.transport.is_closing():
                crowd.idle[self] = None
                if self._half_closed or crowd.closing:
                    self.leave()
                elif self._refused:
                    self.flow.pause_reading()
                    self._later = self.loop.call_later(crowd.seconds_unread(self.loop.time()), self.flow.resume_reading)

        def send_400_response(self, msg: str) -> None:
            msg = self._refusal or msg
            if self.cycle is None or self.cycle.response_complete:
                super().send_400_response(msg)
            else:  # pipelined: a 400 now would take the place of an earlier answer, or land inside it
                self._close()

        def on_headers_complete(self) -> None:
            if len(self.pipeline) >= SENT_AHEAD:
                self._refusal = f"More than {SENT_AHEAD} requests were sent ahead."
            elif len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEADERS_BYTES:
                self._refusal = f"The head of the request is longer than {HEADERS_BYTES} bytes."
            if self._refusal:
                raise ValueError(self._refusal)  # uvicorn answers 400
            self._stop()
            self._in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body = False
            self._bytes = 0
            if self._limit is not None:  # the rest of an answered request: the next one gets the full time
                self._start()
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait_for_reading()

        def resume_writing(self) -> None:
            self._stop_waiting()
            super().resume_writing()

        def _wait_for_reading(self, before: int | None = None) -> None:
            """Check every ``seconds`` that the client has read something since ``before``; if not, cut it off."""
            self._stop_waiting()
            left = self.transport.get_write_buffer_size()
            if before is None or left < before:
                self._unread = self.loop.call_later(seconds, self._wait_for_reading, left)
            else:
                self.transport.abort()

        def timeout_keep_alive_handler(self) -> None:
            self._close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            self._stop_waiting()
            if self._later is not None:
                self._later.cancel()
            crowd.idle.pop(self, None)
            self._let_go()
            if self._address is not None:
                crowd.by_address[self._address] -= 1
                if not crowd.by_address[self._address]:
                    del crowd.by_address[self._address]
            super().connection_lost(exc)

        def _let_go(self) -> None:
            """Drop the answer under way, which no one will get: writing it would fail, with fifty lines in the log."""
            if self._answered is not None and not self._answered.response_complete:
                self._answered.disconnected = True
                self._answered.message_event.set()

        def _close(self) -> None:
            self._let_go()
            if self.transport.get_write_buffer_size():
                self.transport.abort()  # the client does not read
            else:
                self.transport.close()

        def _start(self) -> None:
            self._stop()
            self._limit = self.loop.call_later(seconds, self._close)

        def _stop(self) -> None:
            self._bytes = 0
            if self._limit is not None:
                self._limit.cancel()
                self._limit = None

        def _stop_waiting(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

    return Patient
