"""Connections have limits, which hold before any key: of bytes, of headers, of time, of their number."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from smcjax.server import connections, process
from smcjax.server.models import Models
from tests.server.conftest import Running, connect, running

GET = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def locked(models: Models) -> Iterator[Running]:
    with running(models, keys=("a-key-of-some",)) as server:
        yield server


def answer(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: client.recv(1 << 16), b""))
    return b""


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET /" + b"a" * connections.HEAD_BYTES, (431, "too_large")),
        (GET + b"a: " + b"a" * connections.HEAD_BYTES, (431, "too_large")),
        (GET + b"a: b\r\n" * connections.HEADERS + b"\r\n", (431, "too_large")),
        (GET + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 100_000, (401, "invalid_api_key")),
        (b"nonsense\r\n\r\n", (400, "invalid_http")),
        ((GET + b"\r\n") * 10_000, (503, "unavailable")),
    ],
    ids=["url", "header", "headers", "trailers", "nonsense", "requests"],
)
def test_heads_are_bounded(locked: Running, sent: bytes, expected: tuple[int, str]) -> None:
    """Whether they come at once or slowly; the server closes, and another connection works."""
    with connect(locked) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for at in range(0, len(sent), 8192):
                client.sendall(sent[at : at + 8192])
        said = answer(client)
    if said:  # else the answer was lost with what had not been read
        assert f"HTTP/1.1 {expected[0]} ".encode() in said
    with locked.http(authorization="Bearer a-key-of-some") as http:
        assert http.get("/v1/models", headers={"a": "b" * 30_000}).status_code == 200


@pytest.mark.parametrize("begin", [b"", b"GET / HT", GET, GET + b"content-length: 9\r\n\r\n"])
def test_late_heads_are_closed(locked: Running, monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    """A connection that says nothing, one that says some, one whose body is not waited for, though bytes come."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with connect(locked) as client:
        client.sendall(begin)
        client.settimeout(0.1)
        began, closed = time.monotonic(), False
        while not closed and time.monotonic() - began < 15:
            try:
                closed = not client.recv(1 << 16)
                if begin and not closed:
                    client.sendall(b"x")
            except TimeoutError:
                client.sendall(b"x" if begin else b"")
            except (BrokenPipeError, ConnectionResetError):
                closed = True
    assert closed


def test_silent_connections_make_room(locked: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest idle one goes for each that comes, and one that is answered never."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(locked)) for _ in range(30)]
        for client in silent[::2]:
            client.sendall(b"GET / HT")
        for _ in range(3):
            with locked.http() as http:
                assert http.get("/health").status_code == 200
        assert answer(silent[0]) == answer(silent[20]) == b""


def test_a_reader_that_takes_nothing_is_cut() -> None:
    """One that takes `WRITE_BYTES` a minute, or all that is there, is not."""
    seconds, some = connections.WRITE_SECONDS, connections.WRITE_BYTES

    async def cuts(lengths: list[int]) -> bool:
        config = uvicorn.Config(FastAPI(), http=connections.Connection, log_config=None)
        connection = connections.Connection(config, ServerState(), {}, asyncio.get_running_loop())
        transport = MagicMock()
        connection.connection_made(transport)
        connection.cycle = MagicMock(response_complete=False)
        for number, length in enumerate(lengths):
            transport.get_write_buffer_size.return_value = length
            connection.check(number * seconds * 0.6)
        return bool(transport.abort.called)

    assert asyncio.run(cuts([9 * some] * 3))
    assert asyncio.run(cuts([9 * some, 9 * some - 1, 9 * some - 2]))
    assert not asyncio.run(cuts([9 * some - number * some for number in range(9)]))
    assert not asyncio.run(cuts([1, 0] * 9))


def test_answers_that_readers_leave_are_bounded(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers go, those first that have been awaited longest, whether or not they take some; the last answer stays."""

    async def cuts(lengths: list[int]) -> list[bool]:
        config = uvicorn.Config(FastAPI(), http=connections.Connection, log_config=None)
        made = [connections.Connection(config, ServerState(), {}, asyncio.get_running_loop()) for _ in lengths]
        transports = [MagicMock() for _ in lengths]
        for number, (connection, transport, length) in enumerate(zip(made, transports, lengths, strict=True)):
            transport.get_write_buffer_size.return_value = length
            connection.connection_made(transport)
            connection.cycle = MagicMock(response_complete=False)
            connection.check(float(number))
        connections.bound_unread(reversed(made))
        return [transport.abort.called for transport in transports]

    most = connections.MAX_UNREAD
    assert asyncio.run(cuts([most // 2, 0, most // 2])) == [False] * 3
    assert asyncio.run(cuts([most // 2, 0, most // 2, 1])) == [True, False, False, False]
    assert asyncio.run(cuts([1, most // 2, most, most])) == [True, True, True, False]
    assert asyncio.run(cuts([2 * most])) == [False]

    seen = threading.Event()
    monkeypatch.setattr(process, "bound_unread", lambda _: seen.set())
    with running(models):
        assert seen.wait(20)


@pytest.mark.parametrize("size", [7, 1 << 16])
def test_an_offer_to_upgrade_is_not_taken(server: Running, caplog: pytest.LogCaptureFixture, size: int) -> None:
    """Java's client makes one with each request: the body is read all the same, and so are the requests behind it."""
    body = b'{"prompt": "ab", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    sent = b"".join(
        (
            head + offer + b"content-length: %d\r\n\r\n%s" % (len(body), body),
            head + offer + b"transfer-encoding: chunked\r\n\r\n5\r\n%s\r\n%x\r\n" % (body[:5], len(body) - 5),
            body[5:] + b"\r\n0\r\n\r\n",
            GET + offer + b"\r\n",
            GET + b"connection: close\r\n\r\n",
        )
    )
    with connect(server) as client:
        for at in range(0, len(sent), size):
            client.sendall(sent[at : at + size])
        said = answer(client)
    assert said.count(b"HTTP/1.1 200 OK") == said.count(b"HTTP/1.1") == 4
    assert said.count(b'"completion_tokens":2') == 2
    assert not caplog.records
    with connect(server) as client:
        client.sendall(b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert answer(client).startswith(b"HTTP/1.1 400 ")
