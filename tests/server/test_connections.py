"""Connections have limits, which hold before any key: of bytes, of headers, of time, of their number."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from smcjax.server import connections
from smcjax.server.models import Models
from tests.server.conftest import Running, running

GET = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def locked(models: Models) -> Iterator[Running]:
    with running(models, keys=("a-key-of-some",)) as server:
        yield server


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: client.recv(1 << 16), b""))
    return b""


def status(client: socket.socket) -> tuple[int, str | None]:
    """The status and the error's code of the answer behind which the server closes."""
    head, _, body = answer(client).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET /" + b"a" * connections.HEAD_BYTES, (431, "too_large")),
        (GET + b"a: " + b"a" * connections.HEAD_BYTES, (431, "too_large")),
        (GET + b"a: b\r\n" * connections.HEADERS + b"\r\n", (431, "too_large")),
        (GET + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20_000, (401, "invalid_api_key")),
        (b"nonsense\r\n\r\n", (400, "invalid_http")),
    ],
    ids=["url", "header", "headers", "trailers", "nonsense"],
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
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 8)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(locked)) for _ in range(30)]
        for client in silent[::2]:
            client.sendall(b"GET / HT")
        for _ in range(3):
            with locked.http() as http:
                assert http.get("/health").status_code == 200
        assert answer(silent[0]) == b""
        assert answer(silent[20]) == b""


def test_a_reader_that_reads_nothing_is_cut(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, and its request is over; one that reads slowly is not."""
    monkeypatch.setattr(connections, "WRITE_SECONDS", 1.0)
    monkeypatch.setattr(connections, "WRITE_BYTES", 1)
    fields = {"prompt": "ab", "n": 30, "max_tokens": 90, "logprobs": 20, "ignore_eos": True, "smc": {"trace": True}}
    body = json.dumps(fields).encode()
    sent = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    sent += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
    with running(models) as server, connect(server) as stalled, connect(server) as slow:
        for client in (stalled, slow):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(sent)
        whole = b""
        while piece := slow.recv(1 << 17):
            whole += piece
            time.sleep(0.02)
        length = int(whole.partition(b"content-length: ")[2].split()[0])
        assert len(whole.partition(b"\r\n\r\n")[2]) == length > 10**6
        time.sleep(2.5)
        assert len(answer(stalled)) < length
