"""Bodies of requests: JSON objects of bounded size and depth that come in time, or one sentence about what is wrong."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn

from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from smcjax.plain import is_unicode, short
from smcjax.server.errors import APIError

DEPTH = 32  # of arrays and objects in each other
CLOSE = {"connection": "close"}  # what is left of the body is not waited for


async def read_body[B: BaseModel](request: Request, kind: type[B], *, limit: int, seconds: float) -> B:
    """The request's body, of at most `limit` bytes that come within `seconds`.

    Raises APIError, or pydantic's ValidationError for an object that is no `kind`.
    """
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise APIError(400, f"content-type must be application/json, got {short(declared)}; set that header.")
    try:
        async with asyncio.timeout(seconds):
            data = await _read(request, limit)
    except TimeoutError:
        raise APIError(
            408, f"the body did not come within {seconds:g} s; send it faster.", code="timeout", headers=CLOSE
        ) from None
    except ClientDisconnect:
        raise APIError(400, "the body ended too early; send all of it.") from None
    return kind.model_validate(parse(data))


async def _read(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    data = bytearray()
    if not (length.isdecimal() and len(length) < 20 and int(length) > limit):
        async for piece in request.stream():
            data += piece
            if len(data) > limit:
                break
        else:
            return bytes(data)
    raise APIError(413, f"the body is larger than {limit} bytes; send a shorter one.", code="too_large", headers=CLOSE)


def parse(data: bytes) -> dict[str, Any]:
    """The object that `data` is in JSON. Raises APIError for anything else, and for what no field can mean."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # not UTF-8, not JSON, a number of thousands of digits
        raise APIError(400, f"the body is no JSON ({error}); mend it.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise APIError(400, f"the body must be a JSON object, got {short(value)}; wrap it.", code="invalid_json")
    _check(value)
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _too_deep() -> APIError:
    return APIError(400, f"the body nests deeper than {DEPTH} levels; flatten it.", code="invalid_json")


def _check(value: Any) -> None:
    """Refuses depth, infinite numbers, and text with half a surrogate pair, anywhere inside."""
    level = [value]
    for _ in range(DEPTH + 1):
        following: list[Any] = []
        for one in level:
            inside = [*one, *one.values()] if isinstance(one, dict) else one
            for part in inside:
                if isinstance(part, dict | list):
                    following.append(part)
                elif isinstance(part, str) and not is_unicode(part):
                    raise APIError(
                        400, f"the body holds {short(part)}, which is not Unicode; mend it.", code="invalid_json"
                    )
                elif isinstance(part, float) and not math.isfinite(part):
                    raise APIError(400, "the body holds a number beyond all floats; lower it.", code="invalid_json")
        level = following
        if not level:
            return
    raise _too_deep()
