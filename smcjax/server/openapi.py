"""The OpenAPI document: the server reads bodies (`smcjax.server.requests.body`), so FastAPI does not know them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from smcjax.server.requests.schemas import Ask, ChatAsk, CompletionAsk

_SCHEMAS = "#/components/schemas/"
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": _STREAM}}
JSON_OR_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}, **_STREAM}}
}
PLAIN: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body_of(ask: type[Ask]) -> dict[str, Any]:
    """Describes the body of a route that reads such requests."""
    schema = {"$ref": f"{_SCHEMAS}{ask.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_document(app: FastAPI) -> None:
    """Makes the application's document one that names the bodies, and the shape of errors for every operation."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for ask in (CompletionAsk, ChatAsk):
        schema = ask.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
        schemas |= schema.pop("$defs", {}) | {ask.__name__: schema}
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which no reply has
        schemas.pop(unused, None)
    schemas["Error"] = _ERROR
    error = {
        "description": "An error, in one sentence.",
        "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}},
    }
    for operations in found["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": error, "5XX": error}
    return found
