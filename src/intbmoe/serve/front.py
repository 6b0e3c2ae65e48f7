"""The HTTP application of a front: checks and encodes a request, asks an engine, and answers in time.

Starlette without FastAPI's layer: what a request must look like comes from the artifact and is checked by its encoder,
so that there is nothing for FastAPI's models to do, and the layer halves the rate a front can carry.
"""

import asyncio
import hmac
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from intbmoe.export.predictor import RequestError
from intbmoe.serve.links import LEFT, Call, Dispatcher, Generation, Outcome
from intbmoe.serve.metrics import FrontMetrics, read_metrics
from intbmoe.serve.openapi import ACTIONS, DEADLINE, describe
from intbmoe.serve.page import page_response
from intbmoe.serve.responses import JSON, LINES, HttpError, TextStream, json_response
from intbmoe.serve.settings import Settings

LARGE_BODY = 65_536
"""From here on a request is encoded beside the event loop, so that the others do not wait."""
LINGER_BYTES = 64 * 2**20
"""How much of a body that is too large is passed over: closing the connection at once would take the answer with it."""
CLOSE = {"connection": "close"}
"""What is left unread of a request would be taken for the next one."""
Reload = Callable[[], Awaitable[dict[str, Any]]]


class Front:
    """Everything between a client's connection and the engines."""

    def __init__(self, settings: Settings, dispatcher: Dispatcher, metrics: FrontMetrics, reload: Reload) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._reload = reload
        self._keys = settings.api_keys()
        self._document: tuple[int, Response] | None = None
        self.draining = False

    def app(self) -> Starlette:
        """The application for uvicorn."""
        routes = [Route(f"/v1/{action}", self._endpoint(action), methods=["POST"]) for action in ACTIONS]
        routes += [
            Route("/", self._page),
            Route("/openapi.json", self._openapi),
            Route("/health/live", self._live),
            Route("/health/ready", self._ready),
            Route("/metrics", self._figures),
            Route("/v1/model", self._model),
            Route("/v1/reload", self._reload_now, methods=["POST"]),
        ]
        handlers = {HttpError: lambda _, error: error.response(), HTTPException: _standard_error, Exception: _bug}
        return Starlette(routes=routes, exception_handlers=handlers)

    def _endpoint(self, action: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            started = time.monotonic()
            self._metrics.in_flight.inc()
            try:
                outcome, response = "answered", await self._answer(request, action)
            except HttpError as error:
                outcome, response = error.outcome, error.response()
            except ClientDisconnect:
                outcome, response = "left", Response(status_code=499)
            except Exception:
                outcome = "failed"
                raise
            finally:
                self._metrics.in_flight.dec()
                self._metrics.ended(action, outcome, time.monotonic() - started)
            return response

        return endpoint

    async def _answer(self, request: Request, action: str) -> Response:
        headers = _headers_of(request)
        self._authorise(headers)
        generation = self._generation(action)
        seconds = self._seconds(headers, action)
        body = await self._body(request, headers, generation)
        content = parse_json(body)
        streamed = action == "generate" and content.get("stream", True) is not False
        deadline = time.monotonic() + seconds
        call = Call(content, deadline, streamed)
        try:
            await _encode(call, generation, len(body))
        except RequestError as error:
            call.finish(LEFT)
            raise HttpError(422, str(error), field=error.field, outcome="bad") from error
        if not call.done.done():
            self._dispatcher.send(call)
        watcher = asyncio.create_task(_watch(request, call))
        if call.pieces is not None:
            return await self._stream(request, call, watcher, seconds)
        try:
            outcome = await call.done
        finally:
            watcher.cancel()
            call.finish(LEFT)
        return json_response(_content_of(outcome, seconds), headers=self._headers(call))

    async def _stream(self, request: Request, call: Call, watcher: asyncio.Task, seconds: float) -> Response:
        # The first piece decides about the status: until then the request can still be refused in the usual way.
        first = await call.pieces.get()
        if first is None:
            watcher.cancel()
            _content_of(call.done.result(), seconds)

        async def events() -> AsyncIterator[tuple[str, Any]]:
            piece = first
            while piece is not None:
                yield "text", piece
                piece = await call.pieces.get()
            outcome = call.done.result()
            if outcome.name == "left":  # nobody reads how it ends
                return
            try:
                yield "done", _content_of(outcome, seconds)
            except HttpError as error:
                yield "error", error.content

        def ended() -> None:
            watcher.cancel()
            call.finish(LEFT)  # does nothing where the text has ended
            self._metrics.streams.labels(call.done.result().name).inc()

        response = TextStream(events(), LINES in request.headers.get("accept", ""), self._settings.patience_s, ended)
        response.headers.update(self._headers(call))
        return response

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {"x-model-version": call.generation.opened.version}
        if self.draining:
            headers["connection"] = "close"
        return headers

    def _authorise(self, headers: Mapping[str, str]) -> None:
        if not self._keys:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
        # All keys are compared, each in constant time: the answer takes as long whatever was sent.
        if not any([hmac.compare_digest(key, known) for known in self._keys]):  # noqa: C419
            message = "this server asks for a key: send the header 'Authorization: Bearer KEY'"
            raise HttpError(401, message, outcome="unauthorised", headers={"www-authenticate": "Bearer"})

    def _generation(self, action: str | None = None) -> Generation:
        generation = self._dispatcher.current
        if generation is None:
            raise HttpError(503, "the model is being loaded", outcome="unavailable", headers={"retry-after": "1"})
        if action is not None and action != generation.action:
            message = f"this server's model does not {action}: POST /v1/{generation.action}"
            raise HttpError(404, message, outcome="bad")
        return generation

    def _seconds(self, headers: Mapping[str, str], action: str) -> float:
        most = self._settings.deadline_s(action)
        asked = headers.get(DEADLINE)
        if asked is None:
            return most
        try:
            value = float(asked)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            message = f"{DEADLINE}={asked[:60]!r} is not allowed: it must be a positive number of milliseconds"
            raise HttpError(422, message, field=DEADLINE, outcome="bad")
        return min(value / 1000, most)

    async def _body(self, request: Request, headers: Mapping[str, str], generation: Generation) -> bytes:
        if headers.get("content-type", JSON).partition(";")[0].strip().lower() != JSON:
            raise HttpError(415, f"a request is JSON: send 'Content-Type: {JSON}'", outcome="bad")
        most = self._settings.body_bytes or generation.opened.encoder.limits.body_bytes
        length = headers.get("content-length", "0")
        size = 0 if length.isdecimal() and int(length) <= most else most + 1
        parts, late = [], False
        try:
            async with asyncio.timeout(self._settings.patience_s):
                async for part in request.stream():
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    elif size > most + LINGER_BYTES:
                        break
        except TimeoutError:
            late = True
        if size > most:
            message = f"the request is larger than the {most} bytes allowed"
            raise HttpError(413, message, outcome="too_large", headers=CLOSE)
        if late:
            message = f"the request did not arrive within {self._settings.patience_s:g} s"
            raise HttpError(408, message, outcome="too_slow", headers=CLOSE)
        return b"".join(parts)

    async def _page(self, request: Request) -> Response:
        return page_response()

    async def _openapi(self, request: Request) -> Response:
        generation = self._generation()
        if self._document is None or self._document[0] != generation.number:
            document = describe(generation.opened, self._settings, with_key=bool(self._keys))
            self._document = generation.number, json_response(document)
        return self._document[1]

    async def _live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def _ready(self, request: Request) -> Response:
        ready = self._dispatcher.ready and not self.draining
        return json_response({"ready": ready, "draining": self.draining}, 200 if ready else 503)

    async def _figures(self, request: Request) -> Response:
        self._authorise(_headers_of(request))
        body, kind = read_metrics(self._metrics.registry)
        return Response(body, headers={"content-type": kind})

    async def _model(self, request: Request) -> Response:
        self._authorise(_headers_of(request))
        opened = self._generation().opened
        encoder = opened.encoder
        return json_response(
            {
                "version": opened.version,
                "action": encoder.action,
                **opened.about,
                "limits": {key: value for key, value in asdict(encoder.limits).items() if value is not None},
                "budget_ms": self._settings.budget_ms,
                "deadline_ms": 1000 * self._settings.deadline_s(encoder.action),
                "request": encoder.request_schema,
            }
        )

    async def _reload_now(self, request: Request) -> Response:
        headers = _headers_of(request)
        self._authorise(headers)
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HttpError(403, "another site's page may not reload this server", outcome="unauthorised")
        if not self._keys and not self._settings.on_loopback:
            message = "without a key, a server that others can reach is reloaded by SIGHUP to its supervisor only"
            raise HttpError(403, message, outcome="unauthorised")
        result = await self._reload()
        self._metrics.reloads.labels("done" if result["ok"] else "refused").inc()
        if not result["ok"]:
            raise HttpError(409, result["why"], outcome="bad")
        return json_response({"version": result["version"], "previous": result["previous"]})


def _headers_of(request: Request) -> dict[str, str]:
    """By lower-case name; Starlette's own look each up by going through all of them."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in request.scope["headers"]}


async def _encode(call: Call, generation: Generation, size: int) -> None:
    """Beside the event loop where it may take long, so that the others do not wait; and no longer than the call has."""
    # A file of a few kilobytes can be an image of millions of pixels.
    if size < LARGE_BODY and generation.opened.encoder.limits.image_pixels is None:
        call.encode(generation)
        return
    encoding = asyncio.create_task(asyncio.to_thread(call.encode, generation))
    await asyncio.wait({encoding, call.done}, return_when=asyncio.FIRST_COMPLETED)
    if encoding.done():
        encoding.result()
    else:
        encoding.cancel()


async def _watch(request: Request, call: Call) -> None:
    """Ends the call when the client leaves."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        call.finish(LEFT)


def parse_json(body: bytes) -> dict[str, Any]:
    """The request's object."""
    try:
        content = DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise HttpError(422, f"the body is not JSON: {error}"[:200], field="body", outcome="bad") from error
    if not isinstance(content, dict):
        message = f"the body is a JSON {type(content).__name__}: it must be an object"
        raise HttpError(422, message, field="body", outcome="bad")
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _content_of(outcome: Outcome, seconds: float) -> Any:
    """The answer, or the error that a client gets in its place."""
    if outcome.name == "answered":
        return outcome.content[0]
    if outcome.name == "bad":
        field, message = outcome.content
        raise HttpError(422, message, field=field, outcome="bad")
    if outcome.name == "refused":
        reason, wait = outcome.content
        headers = {"retry-after": str(max(1, math.ceil(wait)))}
        raise HttpError(429, f"too many requests: {reason}", outcome="refused", headers=headers)
    if outcome.name == "expired":
        message = f"no answer within the {1000 * seconds:g} ms of this request"
        raise HttpError(504, message, outcome="expired")
    if outcome.name == "unavailable":
        raise HttpError(503, outcome.content[0], outcome="unavailable", headers={"retry-after": "1"})
    if outcome.name == "left":
        raise ClientDisconnect
    raise HttpError(500, outcome.content[0], outcome="failed")


async def _standard_error(request: Request, error: HTTPException) -> Response:
    return json_response(
        {"error": {"status": error.status_code, "message": f"{request.method} {request.url.path}: {error.detail}"}},
        error.status_code,
        error.headers,
    )


async def _bug(request: Request, error: Exception) -> Response:
    return json_response({"error": {"status": 500, "message": "an error in the server; its log says more"}}, 500)
