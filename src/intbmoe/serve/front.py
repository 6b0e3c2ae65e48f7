"""The HTTP application of a front: checks and encodes a request, asks an engine, and answers in time.

It uses Starlette without FastAPI: the artifact's encoder already checks requests, so FastAPI would have nothing to do
and would halve the rate of a front.
"""

import asyncio
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

from intbmoe.serve.access import Access
from intbmoe.serve.door import refuse_late
from intbmoe.serve.http import LINES, BodyMemory, HttpError, Share, TextStream, json_response, read_body
from intbmoe.serve.links import LEFT, Call, Dispatcher, Outcome, ServedVersion
from intbmoe.serve.metrics import FrontMetrics, read_metrics
from intbmoe.serve.openapi import DEADLINE, describe, known_predictors
from intbmoe.serve.page import page_response
from intbmoe.serve.settings import Settings


class Front:
    def __init__(
        self,
        settings: Settings,
        dispatcher: Dispatcher,
        metrics: FrontMetrics,
        reload: Callable[[], Awaitable[dict[str, Any]]],
        access: Access,
    ) -> None:
        self._settings, self._dispatcher, self._metrics, self._reload = settings, dispatcher, metrics, reload
        self._access = access
        self._memory = BodyMemory(settings.body_memory_bytes)
        self.draining = False

    def app(self) -> Starlette:
        actions = sorted({predictor.action for predictor in known_predictors()})
        routes = [Route(f"/v1/{action}", self._endpoint(action), methods=["POST"]) for action in actions]
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
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # a redirect would send clients to whatever their Host header says
        return app

    def tell_memory(self) -> None:
        """Update the metric, once per second: at every request it would cost too much."""
        self._metrics.body_bytes.set(self._memory.held)

    def _endpoint(self, action: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            started, outcome, response = time.monotonic(), "failed", None
            share = Share(self._memory)
            self._metrics.in_flight.inc()

            def give_back() -> None:
                self._metrics.in_flight.dec()
                share.give_back()

            try:
                response = await self._answer(request, action, share)
                outcome = "answered"
            except HttpError as error:
                outcome, response = error.outcome, error.response()
            except ClientDisconnect:
                outcome, response = "left", Response(status_code=499)
            except asyncio.CancelledError:
                outcome = "left"
                raise
            finally:
                self._metrics.ended(action, outcome, time.monotonic() - started)
                if isinstance(response, TextStream):  # it ends when its text does
                    response.at_end(give_back)
                else:
                    give_back()
            return response

        return endpoint

    async def _answer(self, request: Request, action: str, share: Share) -> Response:
        headers = _headers_of(request)
        self._access.authorise(headers)
        served = self._served(action)
        streams = served.opened.encoder.streams
        seconds = self._seconds(headers, streams)
        refuse_late(served.door.expected_seconds(), seconds)
        most = self._settings.body_bytes or served.opened.encoder.limits.body_bytes
        limits = {"most": min(most, self._memory.most), "patience_s": self._settings.patience_s}
        body = await read_body(request, headers, share, **limits)
        # Texts are not counted: they are written at the same time, and some are a hundred times as long as others.
        call = Call(body, time.monotonic() + seconds, None if streams else served.door.enter())
        watcher, response = asyncio.create_task(_watch(request, call)), None

        def give_up() -> None:
            call.finish(LEFT)  # does nothing if the call has ended
            watcher.cancel()

        try:
            await call.encode(served)
            if not call.done.done():
                self._dispatcher.send(call)
            if call.pieces is not None:
                response = await self._stream(request, call, seconds)
                response.at_end(give_up)
                return response
            outcome = await call.done
        finally:
            if response is None:
                give_up()
        return json_response(_content_of(outcome, seconds), headers={"x-model-version": call.served.opened.version})

    async def _stream(self, request: Request, call: Call, seconds: float) -> TextStream:
        # Until the first piece is there, the request can still be refused with another status.
        first = await call.pieces.get()
        if first is None:
            _content_of(call.done.result(), seconds)

        async def events() -> AsyncIterator[tuple[str, Any]]:
            piece = first
            while piece is not None:
                yield "text", piece
                piece = await call.pieces.get()
            outcome = call.done.result()
            if outcome.name == "left":  # no one is reading
                return
            try:
                yield "done", _content_of(outcome, seconds)
            except HttpError as error:
                yield "error", error.content

        response = TextStream(events(), LINES in request.headers.get("accept", ""), self._settings.patience_s)
        response.headers["x-model-version"] = call.served.opened.version
        response.at_end(lambda: self._metrics.streams.labels(call.done.result().name).inc())
        return response

    def _served(self, action: str | None = None) -> ServedVersion:
        served = self._dispatcher.current
        if served is None:
            raise HttpError(503, "the model is still loading", outcome="unavailable", headers={"retry-after": "1"})
        known = served.opened.encoder.action
        if action not in (None, known):
            raise HttpError(404, f"this server's model does not {action}: POST /v1/{known}", outcome="bad")
        return served

    def _seconds(self, headers: Mapping[str, str], streams: bool) -> float:
        most = self._settings.deadline_s(streams)
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

    async def _page(self, request: Request) -> Response:
        return page_response(request.headers.get("if-none-match", ""))

    async def _openapi(self, request: Request) -> Response:
        return json_response(describe(self._served().opened, self._settings, with_key=self._access.with_key))

    async def _live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def _ready(self, request: Request) -> Response:
        ready = self._dispatcher.ready and not self.draining
        return json_response({"ready": ready, "draining": self.draining}, 200 if ready else 503)

    async def _figures(self, request: Request) -> Response:
        self._access.authorise(_headers_of(request))
        self.tell_memory()
        body, kind = read_metrics(self._metrics.registry)
        return Response(body, headers={"content-type": kind})

    async def _model(self, request: Request) -> Response:
        self._access.authorise(_headers_of(request))
        opened = self._served().opened
        encoder = opened.encoder
        return json_response(
            {
                "version": opened.version,
                "action": encoder.action,
                **opened.about,
                "limits": {key: value for key, value in asdict(encoder.limits).items() if value is not None},
                "budget_ms": self._settings.budget_ms,
                "deadline_ms": 1000 * self._settings.deadline_s(encoder.streams),
                "request": encoder.request_schema,
                "streams": encoder.streams,
                "form": None if encoder.form is None else encoder.form.stem,
            }
        )

    async def _reload_now(self, request: Request) -> Response:
        self._access.authorise_reload(_headers_of(request))
        result = await self._reload()
        self._metrics.reloads.labels("done" if result["ok"] else "refused").inc()
        if not result["ok"]:
            raise HttpError(409, result["why"], outcome="bad")
        return json_response({"version": result["version"], "previous": result["previous"]})


def _headers_of(request: Request) -> dict[str, str]:
    """Return the headers by lower-case name; Starlette's own ``headers`` searches all of them at each lookup."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in request.scope["headers"]}


async def _watch(request: Request, call: Call) -> None:
    message = await request.receive()
    if message["type"] == "http.disconnect":
        call.finish(LEFT)


def _content_of(outcome: Outcome, seconds: float) -> Any:
    """Return the answer, or raise the ``HttpError`` of any other outcome."""
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
        raise HttpError(504, f"no answer within this request's {1000 * seconds:g} ms", outcome="expired")
    if outcome.name == "unavailable":
        raise HttpError(503, outcome.content[0], outcome="unavailable", headers={"retry-after": "1"})
    if outcome.name == "left":
        raise ClientDisconnect
    raise HttpError(500, outcome.content[0], outcome="failed")


async def _standard_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return HttpError(error.status_code, message, outcome="bad", headers=error.headers).response()


async def _bug(request: Request, error: Exception) -> Response:
    return HttpError(500, "an error in the server; see its log", outcome="failed").response()
