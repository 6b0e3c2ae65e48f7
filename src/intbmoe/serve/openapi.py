"""The OpenAPI document of a server: what its model can be asked, with the artifact's own schema and examples."""

from typing import Any

from intbmoe.registry import find_task, list_tasks
from intbmoe.serve.http import EVENTS, JSON, LINES
from intbmoe.serve.loading import Opened
from intbmoe.serve.settings import Settings
from intbmoe.version import program_version

DEADLINE = "x-deadline-ms"
ERRORS = {
    "404": "The model of this server does something else.",
    "408": "The request came too slowly.",
    "413": "The request is too large.",
    "415": "The request is not application/json.",
    "422": "The request is not allowed; `field` says where and `message` what is allowed.",
    "429": "Too many requests; `Retry-After` says in how many seconds to come again.",
    "500": "The model failed on this request.",
    "503": "No engine is running at the moment.",
    "504": "There was no answer before the request's deadline.",
}
UNAUTHORISED = {"401": "The key is missing or wrong."}


def known_actions() -> list[str]:
    """What the models of all tasks can be asked: of each server's model, one of them."""
    predictors = [find_task(name).predictor for name in list_tasks()]
    return sorted({predictor.action for predictor in predictors if predictor is not None})


def describe(opened: Opened, settings: Settings, *, with_key: bool) -> dict[str, Any]:
    """The document, with the one action that this artifact has."""
    encoder, action = opened.encoder, opened.encoder.action
    errors = ERRORS | UNAUTHORISED if with_key else ERRORS
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "intbmoe",
            "version": program_version(),
            "description": f"{opened.about.get('method', 'a model')}, version {opened.version}: {encoder.summary}",
        },
        "paths": {
            f"/v1/{action}": {"post": _ask(opened, settings, errors)},
            "/v1/model": {"get": _get("What is served: version, limits, the schema of a request.", with_key)},
            "/v1/reload": {"post": _reload(with_key)},
            "/health/live": {"get": _get("The process answers.", False)},
            "/health/ready": {"get": _get("A warmed-up engine is connected.", False, {"503": "Not ready."})},
            "/metrics": {"get": _metrics(with_key)},
        },
        "components": {"schemas": {"Error": _error_schema()}},
    }
    if with_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _ask(opened: Opened, settings: Settings, errors: dict[str, str]) -> dict[str, Any]:
    encoder = opened.encoder
    content = {JSON: {"schema": {"type": "object"}}}
    if encoder.streams:
        content |= {EVENTS: {"schema": {"type": "string"}}, LINES: {"schema": {"type": "string"}}}
    return {
        "summary": encoder.summary,
        "operationId": encoder.action,
        "parameters": [
            {
                "name": DEADLINE,
                "in": "header",
                "required": False,
                "description": "Milliseconds after which the answer is of no use, "
                f"at most {1000 * settings.deadline_s(encoder.streams):g}.",
                "schema": {"type": "number", "minimum": 1},
            }
        ],
        "requestBody": {"required": True, "content": {JSON: {"schema": encoder.request_schema}}},
        "responses": {
            "200": {
                "description": "The answer.",
                "content": content,
                "headers": {"x-model-version": {"schema": {"type": "string"}}},
            },
            **_responses(errors),
        },
    }


def _get(summary: str, with_key: bool, more: dict[str, str] | None = None) -> dict[str, Any]:
    errors = (more or {}) | (UNAUTHORISED if with_key else {}) | ({} if more else {"503": "Not ready."})
    answer = {"description": "The answer.", "content": {JSON: {"schema": {"type": "object"}}}}
    described = {"summary": summary, "responses": {"200": answer, **_responses(errors)}}
    return described if with_key else {**described, "security": []}


def _metrics(with_key: bool) -> dict[str, Any]:
    answer = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    errors = UNAUTHORISED if with_key else {}
    return {"summary": "Figures over all processes.", "responses": {"200": answer, **_responses(errors)}}


def _reload(with_key: bool) -> dict[str, Any]:
    errors = {"409": "The artifact is broken, or a reload is under way; the old one serves on."}
    errors |= {"403": "Without a key, only a server that listens on loopback is reloaded, by clients that call it so."}
    errors |= UNAUTHORISED if with_key else {}
    answer = {"description": "The new version serves.", "content": {JSON: {"schema": {"type": "object"}}}}
    return {
        "summary": "Load the artifact's folder again, check it, and switch to it without a pause.",
        "operationId": "reload",
        "responses": {"200": answer, **_responses(errors)},
    }


def _responses(errors: dict[str, str]) -> dict[str, Any]:
    content = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": content} for status, text in errors.items()}


def _error_schema() -> dict[str, Any]:
    properties = {"status": {"type": "integer"}, "message": {"type": "string"}, "field": {"type": "string"}}
    error = {"type": "object", "properties": properties, "required": ["status", "message"]}
    return {"type": "object", "properties": {"error": error}}
