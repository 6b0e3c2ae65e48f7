"""The OpenAPI document of a server: what its model accepts, with the artifact's own schema and examples."""

from typing import Any

from intbmoe.registry import find_task, list_tasks
from intbmoe.serve.http import EVENTS, JSON, LINES
from intbmoe.serve.loading import Opened
from intbmoe.serve.settings import Settings
from intbmoe.tasks.serving import Predictor
from intbmoe.version import program_version

DEADLINE = "x-deadline-ms"
ERRORS = {
    "404": "The model of this server does something else.",
    "408": "The request arrived too slowly.",
    "413": "The request is too large.",
    "415": "The request does not say that it is application/json.",
    "422": "The request is not allowed; `field` says where and `message` what is allowed.",
    "429": "Too many requests; `Retry-After` says after how many seconds to try again.",
    "500": "The model failed on this request.",
    "503": "No engine is running at the moment.",
    "504": "There was no answer before the request's deadline.",
}
RELOAD_ERRORS = {
    "409": "The artifact is broken, or a reload is under way; the old one keeps serving.",
    "403": "Without a key, only a server on a loopback address can be reloaded, by clients that use a loopback name.",
}
UNAUTHORISED = {"401": "The key is missing or wrong."}


def known_predictors() -> list[type[Predictor]]:
    """Return the predictors of all tasks; a server has one of them."""
    return [predictor for name in list_tasks() if (predictor := find_task(name).predictor) is not None]


def describe(opened: Opened, settings: Settings, *, with_key: bool) -> dict[str, Any]:
    encoder, unauthorised = opened.encoder, UNAUTHORISED if with_key else {}
    not_ready, open_to_all = {"503": "Not ready."}, {"security": []}
    about = "What is served: version, limits, the schema of a request."
    model = _operation(about, _answer(), unauthorised | not_ready) | ({} if with_key else open_to_all)
    live = _operation("The process answers.", _answer(), not_ready) | open_to_all
    ready = _operation("A warmed-up engine is connected.", _answer(), not_ready) | open_to_all
    reload = _operation(
        "Load the artifact's folder again, check it, and switch to it without a pause.",
        _answer("The new version is serving."),
        RELOAD_ERRORS | unauthorised,
        operationId="reload",
    )
    metrics = _answer("Prometheus' text format.", **{"text/plain": "string"})
    error = {"status": {"type": "integer"}, "message": {"type": "string"}, "field": {"type": "string"}}
    error_schema = {"type": "object", "properties": error, "required": ["status", "message"]}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "intbmoe",
            "version": program_version(),
            "description": f"{opened.about.get('method', 'a model')}, version {opened.version}: {encoder.summary}",
        },
        "paths": {
            f"/v1/{encoder.action}": {"post": _ask(encoder, settings, ERRORS | unauthorised)},
            "/v1/model": {"get": model},
            "/v1/reload": {"post": reload},
            "/health/live": {"get": live},
            "/health/ready": {"get": ready},
            "/metrics": {"get": _operation("Figures over all processes.", metrics, unauthorised)},
        },
        "components": {"schemas": {"Error": {"type": "object", "properties": {"error": error_schema}}}},
    }
    if with_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _ask(encoder: Predictor, settings: Settings, errors: dict[str, str]) -> dict[str, Any]:
    kinds = {JSON: "object"} | ({EVENTS: "string", LINES: "string"} if encoder.streams else {})
    most = 1000 * settings.deadline_s(encoder.streams)
    deadline = {
        "name": DEADLINE,
        "in": "header",
        "required": False,
        "description": f"Milliseconds after which the answer is no longer useful, at most {most:g}.",
        "schema": {"type": "number", "minimum": 1},
    }
    return _operation(
        encoder.summary,
        _answer(**kinds) | {"headers": {"x-model-version": {"schema": {"type": "string"}}}},
        errors,
        operationId=encoder.action,
        parameters=[deadline],
        requestBody={"required": True, "content": {JSON: {"schema": encoder.request_schema}}},
    )


def _operation(summary: str, answer: dict[str, Any], errors: dict[str, str], **more: Any) -> dict[str, Any]:
    content = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    failures = {status: {"description": text, "content": content} for status, text in errors.items()}
    return {"summary": summary, **more, "responses": {"200": answer, **failures}}


def _answer(description: str = "The answer.", **kinds: str) -> dict[str, Any]:
    """Describe a successful response: a JSON object, or one of ``kinds``, by media type."""
    content = {kind: {"schema": {"type": schema}} for kind, schema in (kinds or {JSON: "object"}).items()}
    return {"description": description, "content": content}
