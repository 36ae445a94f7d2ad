"""Around all routes: a request's id, its key, and an answer in the server's shape whatever is raised inside."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smcjax.server.errors import APIError, refusal
from smcjax.server.state import Served

ID = b"x-request-id"
_ID_LENGTH = 128
PUBLIC = re.compile(r"/(health|page(/.*)?)?")  # paths that need no key


class RequestIds:
    """Echoes the client's id of a request, as far as it is one, or makes one; counts requests; answers errors."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app, self._served = app, served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = request_id(next((value for name, value in scope["headers"] if name == ID), b""))
        begun = False

        async def named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message["headers"], (ID, own.encode())]}
            await send(message)

        counts = scope["path"] not in ("/health", "/metrics")
        self._served.in_flight += counts
        try:
            await self._app(scope, receive, named)
        except Exception as error:
            answer = refusal(error).response()
            if not begun:
                await answer(scope, receive, named)
        finally:
            self._served.in_flight -= counts


def request_id(given: bytes) -> str:
    """The characters of a client's id that are safe in logs and headers; a new id where none is left."""
    kept = re.sub(r"[^A-Za-z0-9._:/+=@-]", "", given.decode("latin-1"))[:_ID_LENGTH]
    return kept or uuid.uuid4().hex


class Keys:
    """Lets requests with one of the server's keys pass, and those of public paths."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not PUBLIC.fullmatch(scope["path"]) and not self._opens(scope):
            refused = APIError(
                401,
                "the key is missing or wrong; send one of the server's as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await refused.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _opens(self, scope: Scope) -> bool:
        """Compares with every key, in a time that says nothing about them."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        found = [hmac.compare_digest(digest, one) for one in self._digests]
        return kind.lower() == b"bearer" and any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
