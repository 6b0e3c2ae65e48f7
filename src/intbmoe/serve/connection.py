"""A client's connection: uvicorn's, with bounds on how long and how large the head of a request may be.

A request can be answered before all of it has come: it is too large, asks for what is not there, has no key. Closing
the connection then would take the answer with it, because the client is still sending. So the rest is passed over, up
to a bound in bytes and in time, and the connection goes on.

A client that does not read what it has asked for is cut off: closing would wait for it, for ever.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_BYTES = 65_536
LINGER_BYTES = 64 * 2**20
"""How much of a request that has been answered is passed over."""
TOLD = 256
"""Connections beyond the most that are still told so, with 503; others are closed unheard."""
SENT_AHEAD = 64
"""Requests that may wait for the answer to the one before them; uvicorn itself reads on with every answer."""


def patient_protocol(seconds: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, for clients that take ``seconds`` at most for a head and for what comes after its
    answer, and that in every ``seconds`` read some, where more waits for them than the system keeps.
    """

    class Patient(HttpToolsProtocol):
        _limit: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _bytes = 0
        """Of this head, or of what is passed over."""
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
            else:  # it was sent ahead: this would stand in the place of the answer that comes first, or within it
                self._close()

        def on_headers_complete(self) -> None:
            if len(self.pipeline) >= SENT_AHEAD:
                raise ValueError(f"more than {SENT_AHEAD} requests were sent ahead")  # taken for a bad request
            self._stop()
            self._in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body = False
            self._bytes = 0
            if self._limit is not None:  # the rest of what had been answered: the next one has as long as the first
                self._start()
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait_for_reading()

        def resume_writing(self) -> None:
            self._stop_waiting()
            super().resume_writing()

        def _wait_for_reading(self, before: int | None = None) -> None:
            """Look every ``seconds`` whether less is left than ``before``; where not, that is the end."""
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
                self.transport.abort()  # it is not being read
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
