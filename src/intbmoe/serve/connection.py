"""A client's connection: uvicorn's, with limits on the time and size of a request's head.

A request can be answered before all of it has arrived: it is too large, has no key, asks for an unknown path. Closing
the connection at once would lose the answer, because the client is still sending. So the rest is discarded, up to a
limit in bytes and time, and the connection stays open.

A client that does not read its answer is cut off: a normal close would wait for it forever.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_BYTES = 65_536
LINGER_BYTES = 64 * 2**20  # how much of an already answered request is discarded
TOLD = 256  # connections beyond the limit that still get a 503; further ones are closed at once
SENT_AHEAD = 64  # pipelined requests that may wait for earlier answers; uvicorn itself has no limit


def patient_protocol(seconds: float) -> type[HttpToolsProtocol]:
    """A client has ``seconds`` for a request's head, for the rest of an answered request, and to read some answer."""

    class Patient(HttpToolsProtocol):
        _limit: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _bytes = 0  # of this head, or discarded
        _in_body = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._start()
            if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency + TOLD:
                transport.abort()

        def data_received(self, data: bytes) -> None:
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

        def send_400_response(self, msg: str) -> None:
            if self.cycle is None or self.cycle.response_complete:
                super().send_400_response(msg)
            else:  # pipelined: a 400 now would take the place of an earlier answer, or land inside it
                self._close()

        def on_headers_complete(self) -> None:
            if len(self.pipeline) >= SENT_AHEAD:
                raise ValueError(f"more than {SENT_AHEAD} requests were sent ahead")  # uvicorn answers 400
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
            """Check every ``seconds`` that less is left than ``before``; if not, cut the client off."""
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
            super().connection_lost(exc)

        def _close(self) -> None:
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
