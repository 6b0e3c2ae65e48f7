"""A client's connection: uvicorn's, with bounds on how long and how large the head of a request may be.

A request can be answered before all of it has come: it is too large, asks for what is not there, has no key. Closing
the connection then would take the answer with it, because the client is still sending. So the rest is passed over, up
to a bound in bytes and in time, and the connection goes on.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_BYTES = 65_536
LINGER_BYTES = 64 * 2**20
"""How much of a request that has been answered is passed over."""


def patient_protocol(seconds: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, for clients that take ``seconds`` at most for a head, and for what comes after its answer."""

    class Patient(HttpToolsProtocol):
        _limit: asyncio.TimerHandle | None = None
        _bytes = 0
        """Since the limit began."""
        _in_body = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._start()

        def data_received(self, data: bytes) -> None:
            if self._limit is None and (self.cycle is None or self.cycle.response_complete):
                self._start()
            if self._limit is not None:
                self._bytes += len(data)
            super().data_received(data)
            if self._limit is None or self.transport.is_closing():
                return
            if self._in_body and self._bytes > LINGER_BYTES:
                self.transport.close()
            elif not self._in_body and self._bytes > HEADERS_BYTES:
                self.send_400_response(f"The head of the request is longer than {HEADERS_BYTES} bytes.")

        def on_headers_complete(self) -> None:
            self._stop()
            self._in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body = False
            if self._limit is not None:  # the rest of what had been answered: the next one has as long as the first
                self._start()
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _start(self) -> None:
            self._stop()
            self._limit = self.loop.call_later(seconds, self.transport.close)

        def _stop(self) -> None:
            self._bytes = 0
            if self._limit is not None:
                self._limit.cancel()
                self._limit = None

    return Patient
