"""Connections of clients: how many, how long they may be silent, and how much they may send that is no body.

All of it holds before a request has a key. uvicorn itself bounds none of these.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, cast

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from smcjax.server.errors import CLOSE, APIError, dumps, unavailable

MAX_CONNECTIONS = 512  # half of the descriptors that a process has by default
HEAD_BYTES, HEADERS = 1 << 16, 128  # of a head: a URL and headers, or what stands around the pieces of a body
MAX_PIPELINED = 16  # requests of a connection that come before the answer to an earlier one, of `HEAD_BYTES` in all
HEAD_SECONDS = 10.0  # from a connection, or the last answer in it, to the whole of the next head
WRITE_SECONDS = 60.0  # within which a reader takes `WRITE_BYTES` of what is there for it
WRITE_BYTES = 1 << 16
MAX_UNREAD = 256 << 20  # bytes of answers that wait for their readers, of all connections but the last answered


class _Parser(HttpRequestParser):
    """Goes on in HTTP/1.1 where a client offers to upgrade, as Java's does: httptools itself leaves the body out."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except HttpParserUpgrade as upgrade:
            (begin,) = upgrade.args  # of what stands behind the head
            self.feed_data(self._connection.head_without_upgrade + data[begin:])


class Connection(HttpToolsProtocol):
    """A connection with limits, which `check` watches over; once there are too many, the one longest idle goes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._idle_since = time.monotonic()
        self._loose = 0  # bytes that have come since the last head, or the last piece of a body
        self._refusal: APIError | None = None
        self._under_way: deque[RequestResponseCycle] = deque()  # uvicorn itself knows the last of them alone
        self._behind: deque[int] = deque()  # bytes of those of them that wait for an earlier one's answer
        self._waits: tuple[float, int] | None = None  # since when the reader has been awaited, for how many bytes

    @property
    def idle(self) -> bool:
        """True while no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def unread(self) -> int:
        """Bytes of answers that the reader has not taken yet."""
        return self.transport.get_write_buffer_size()

    @property
    def head_without_upgrade(self) -> bytes:
        """The last head, without the protocols that its client offers."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room where there is none."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            others = cast(set[Connection], self.connections - {self})
            longest = min((one for one in others if one.idle), key=lambda one: one._idle_since, default=None)
            if longest is None:
                self._refuse(unavailable(f"{MAX_CONNECTIONS} requests are under way, the most that may be."))
            else:
                longest.cut()

    def data_received(self, data: bytes) -> None:
        """Takes what comes, as long as it is a request."""
        self._loose += len(data)
        super().data_received(data)
        if self._loose > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_too_large())

    def on_headers_complete(self) -> None:
        """Begins a request. What is raised here becomes `send_400_response`."""
        self._loose = 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > HEAD_BYTES or len(self.headers) > HEADERS:
            self._refusal = _too_large()
            raise ValueError
        if self.parser.should_upgrade():  # `_Parser` reads the head once more, without that
            if self.parser.get_method() == b"CONNECT":
                raise ValueError
            return
        if not self.idle:
            self._behind.append(size)
            self._bound_behind()
        super().on_headers_complete()
        self._under_way.append(self.cycle)
        self.flow.resume_reading()  # uvicorn reads no further now, and would not see that the client leaves

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body. What is raised here becomes `send_400_response`."""
        self._loose = 0
        if self._behind:
            self._behind[-1] += len(body)
            self._bound_behind()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a body."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _bound_behind(self) -> None:
        if len(self._behind) > MAX_PIPELINED or sum(self._behind) > HEAD_BYTES:
            said = f"{MAX_PIPELINED} requests or {HEAD_BYTES} bytes of this connection wait, the most that may."
            self._refusal = unavailable(said)
            raise ValueError

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self._idle_since = time.monotonic()
        self._under_way.popleft()
        if self._behind:
            self._behind.popleft()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends every request of the connection."""
        self._end_requests()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Goes on with a reader that has taken most of what was there."""
        self._waits = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Says, in the server's own shape, what is wrong with a head."""
        self._refuse(self._refusal or APIError(400, "this is no request of HTTP/1.1; mend it.", code="invalid_http"))

    def check(self, now: float) -> None:
        """Closes the connection where a head is late, and cuts it where its reader is."""
        if self.idle and now - self._idle_since > HEAD_SECONDS and not self.transport.is_closing():
            self._refuse(APIError(408, f"no request came within {HEAD_SECONDS:g} s; send it faster.", code="timeout"))
        left = self.unread
        if not left:
            self._waits = None
        elif self._waits is None or left <= self._waits[1] - WRITE_BYTES:
            self._waits = now, left
        elif now - self._waits[0] > WRITE_SECONDS:
            self.cut()

    def cut(self) -> None:
        """Ends the connection at once, whatever is under way in it."""
        self.connections.discard(self)
        self._end_requests()
        self.transport.abort()

    def _end_requests(self) -> None:
        """Lets the requests under way see that their client has gone: none writes where no connection is left."""
        for cycle in self._under_way:
            cycle.disconnected = True
            cycle.message_event.set()

    def _refuse(self, error: APIError) -> None:
        body = dumps(error.body())
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers, **CLOSE}
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._end_requests()
        self.transport.write("\r\n".join([*lines, "", body]).encode())
        self.transport.close()


def bound_unread(connections: Iterable[Connection]) -> None:
    """Cuts readers, those first that have been awaited longest, until no more than `MAX_UNREAD` is left to be read."""
    waiting = [(one._waits[0], one) for one in connections if one._waits is not None]
    unread = sum(one.unread for _, one in waiting)
    for _, one in sorted(waiting, key=lambda since: since[0])[:-1]:
        if unread > MAX_UNREAD:
            unread -= one.unread
            one.cut()


def _too_large() -> APIError:
    said = f"the head of the request has more than {HEAD_BYTES} bytes or {HEADERS} headers; send a smaller one."
    return APIError(431, said, code="too_large")
