"""Around all routes: a request's id, its host, its key, and an answer in the server's shape whatever is raised."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import re
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smcjax.checks import short
from smcjax.server.errors import APIError, refusal, unavailable
from smcjax.server.state import MAX_BODY_BYTES, Served

ID = b"x-request-id"
_ID_LENGTH = 128
PUBLIC = re.compile(r"/(health|page(/.*)?)?")  # paths that need no key


class RequestIds:
    """Echoes the client's id of a request, as far as it is one, or makes one; answers errors.

    Counts requests under way, and the bytes of their bodies: `MAX_BODY_BYTES` at most, all bodies together.
    """

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app, self._served = app, served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = request_id(next((value for name, value in scope["headers"] if name == ID), b""))
        begun, held, served = False, 0, self._served
        most = max(MAX_BODY_BYTES, served.settings.max_body)

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if served.held_bytes + size > most:
                raise unavailable(f"the server holds {most} bytes of requests, the most it may; ask again.")
            held += size
            served.held_bytes += size
            return message

        async def named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message["headers"], (ID, own.encode())]}
            await send(message)

        counts = scope["path"] not in ("/health", "/metrics")
        served.in_flight += counts
        try:
            await self._app(scope, counted, named)
        except Exception as error:
            answer = refusal(error).response()
            if not begun:
                await answer(scope, receive, named)
        finally:
            served.in_flight -= counts
            served.held_bytes -= held


def request_id(given: bytes) -> str:
    """The characters of a client's id that are safe in logs and headers; a new id where none is left."""
    kept = re.sub(r"[^A-Za-z0-9._:/+=@-]", "", given.decode("latin-1"))[:_ID_LENGTH]
    return kept or uuid.uuid4().hex


class Keys:
    """Lets requests with one of the server's keys pass, and those of public paths."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

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
        found = [hmac.compare_digest(hashlib.sha256(key.strip()).digest(), one) for one in self._digests]
        return kind.lower() == b"bearer" and any(found)


class Hosts:
    """Lets requests pass that ask the server by a name of its own: one of this machine's loopback, or of `names`.

    A page of the web can give its own name the address 127.0.0.1, and then a browser takes the server for the page's
    own ("DNS rebinding"); but it tells the name that it asked for.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app, self._names = app, {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for header, value in scope["headers"]:
                if header == b"host" and not self._is_own(value.decode("latin-1")):
                    raise APIError(
                        403,
                        f"this server is not known as {short(value.decode('latin-1'))}; ask it as 127.0.0.1 or "
                        "localhost, or start it with that --allowed-host.",
                        code="host_not_allowed",
                    )
        await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        """True for a name or an address of this server's, whatever port stands behind it."""
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        return is_loopback(name) or name in self._names


def is_loopback(host: str) -> bool:
    """True for addresses of this machine alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
