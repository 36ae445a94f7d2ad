"""Bodies of requests: JSON objects of bounded size and depth that come in time, or one sentence about what is wrong."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from smcjax.checks import is_unicode, short
from smcjax.server.errors import CLOSE, APIError

DEPTH = 32  # of arrays and objects in each other
# In all. What JSON's reader makes of 8 MiB of these takes a second or several, in which it holds all threads up.
MAX_PARTS = 100_000  # objects, arrays and fields
MAX_COMMAS = 1 << 19  # values that stand beside others: 128 prompts of 4096 tokens
_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|([{\[:])|(,)', re.DOTALL)  # or a text, in which there is none


async def read_body(request: Request, *, limit: int, seconds: float) -> bytes:
    """The request's body, of at most `limit` bytes that come within `seconds`. Raises APIError."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise APIError(400, f"content-type must be application/json, got {short(declared)}; set that header.")
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, limit)
    except TimeoutError:
        raise APIError(
            408, f"the body did not come within {seconds:g} s; send it faster.", code="timeout", headers=CLOSE
        ) from None
    except ClientDisconnect:
        raise APIError(400, "the body ended too early; send all of it.") from None


async def _read(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes. Raises APIError for a larger one, of which the connection drops the rest.

    A connection that is closed while its client sends says nothing to many of them.
    """
    length = request.headers.get("content-length", "")
    data = bytearray()
    if not (length.isdecimal() and len(length) < 20 and int(length) > limit):
        async for piece in request.stream():
            data += piece
            if len(data) > limit:
                break
        else:
            return bytes(data)
    raise APIError(413, f"the body is larger than {limit} bytes; send a shorter one.", code="too_large")


def parse(data: bytes) -> dict[str, Any]:
    """The object that `data` is in JSON. Raises APIError for anything else, and for what no field can mean.

    It takes time that grows with the data, so no event loop calls it.
    """
    if _has_too_many_parts(data):
        raise APIError(
            400,
            f"the body has more than {MAX_PARTS} objects, arrays and fields, or {MAX_COMMAS} values; send several "
            "requests.",
            code="invalid_json",
        )
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


def _has_too_many_parts(data: bytes) -> bool:
    """True for too many parts or values; texts are looked through only where there are as many such characters."""
    if sum(map(data.count, (b"{", b"[", b":"))) <= MAX_PARTS and data.count(b",") <= MAX_COMMAS:
        return False
    counts = [0, 0, 0]  # of texts, parts, commas
    for found in _MARK.finditer(data):
        counts[found.lastindex or 0] += 1
        if counts[1] > MAX_PARTS or counts[2] > MAX_COMMAS:
            return True
    return False


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
