"""Errors as clients get them: a status and {"error": {message, type, param, code}}, whatever went wrong."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from smcjax.checks import short
from smcjax.errors import QueueFull

logger = logging.getLogger("smcjax")

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CLOSE = {"connection": "close"}  # what is left of the body is not waited for
RETRY_SECONDS = 1  # after which a client that was turned away may come again
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # one for all: `json.dumps` makes one each time
OBJECTS = ("smc", "stream_options")  # fields of a request that are objects


class APIError(Exception):
    """A request that gets no answer, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object that says so."""
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, usual)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response that says so."""
        return json_response(self.body(), self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON. Raises ValueError for numbers that JSON lacks."""
    return Response(dumps(content), status, headers, "application/json")


def dumps(content: Any) -> str:
    """JSON on one line, in ASCII: no character of it can be mistaken for a line's end or fail to be encoded."""
    return _ENCODER.encode(content)


def refusal(error: Exception, known: frozenset[str] | None = None) -> APIError:
    """Returns the error that a client is told for an exception.

    `known` are the names of the request's fields while these are checked, when a ValueError is a sentence about one.
    An exception that says nothing to clients is logged, and the client learns that it happened.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFull):
        return queue_full(str(error))
    if isinstance(error, ValidationError):
        return _of_fields(error)
    if isinstance(error, ValueError) and known is not None:
        return _of_sentence(str(error), known)
    logger.error("A request failed.", exc_info=error)
    return APIError(500, "the server failed to answer; its log says why.", code="internal_error")


def queue_full(why: str) -> APIError:
    """The error of a server where as many wait as may."""
    return APIError(429, why, code="queue_full", headers={"retry-after": str(RETRY_SECONDS)})


def unavailable(why: str) -> APIError:
    """The error of a server that takes no requests."""
    return APIError(503, why, code="unavailable", headers={"retry-after": str(RETRY_SECONDS)})


def _of_sentence(message: str, known: frozenset[str]) -> APIError:
    """A sentence of the engine's, with the field that it begins with."""
    first = re.match(r"[a-z_]*", message)
    param = first.group() if first is not None and first.group() in known else None
    if param is None and message.startswith(("the prompt", "prompt_token_ids", "a prompt")):
        param = "messages" if "messages" in known else "prompt"
    return APIError(400, message, param=param, code="context_length_exceeded" if is_overlong(message) else None)


def is_overlong(message: str) -> bool:
    """True for the engine's sentence about a prompt that is too long."""
    return re.match(r"the prompt has (more than )?\d+ tokens and max_model_len", message) is not None


def _of_fields(error: ValidationError) -> APIError:
    """The first field that is wrong, and how."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = [str(part) for part in first["loc"]]
    param = _field(first)
    if first["type"] == "extra_forbidden":
        name = ".".join(place)
        return APIError(400, f"{short(name)} is no field of this request; leave it out.", param=short(name).strip("'"))
    if first["type"] == "missing":
        return APIError(400, f"{param} is missing; give it.", param=param)
    said = " or ".join(dict.fromkeys(_rule(one) for one in error.errors() if _field(one) == param))
    name = param or "the body"
    return APIError(400, f"{name} must be {said}, got {short(first['input'])}; mend it.", param=param)


def _field(error: Any) -> str | None:
    """The field that an error is about, of an object in the body by both names; behind them pydantic names types."""
    place = [str(part) for part in error["loc"]]
    return ".".join(place[: 2 if place[0] in OBJECTS else 1]) if place else None


def _rule(error: Any) -> str:
    return str(error["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")


def add_handlers(app: FastAPI) -> None:
    """Makes all errors of the app's routes, and of paths that it has not, come in this shape."""

    async def told(_: Request, error: Exception) -> Response:
        return refusal(error).response()

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            message = f"there is nothing at {short(request.url.path)}; /openapi.json lists what there is."
        elif error.status_code == 405:
            message = f"{request.method} is not for {short(request.url.path)}; /openapi.json lists what is."
        else:
            message = str(error.detail or HTTPStatus(error.status_code).phrase)
        return APIError(error.status_code, message, headers=error.headers).response()

    app.add_exception_handler(APIError, told)
    app.add_exception_handler(ValidationError, told)
    app.add_exception_handler(HTTPException, of_http)
