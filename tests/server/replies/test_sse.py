"""Streams of events: pings while they wait, no more kept than a reader takes, an end for those whose reader goes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from smcjax.server.errors import APIError
from smcjax.server.process import address_of, bound
from smcjax.server.replies.events import MAX_RECORDS, Records
from smcjax.server.replies.sse import EventStream, with_end


class Reader:
    """An ASGI client that keeps what it is sent, each piece after a while, and leaves after some."""

    def __init__(self, seconds: float = 0.0, leaves_after: int | None = None) -> None:
        self.sent: list[str] = []
        self._seconds, self._leaves_after = seconds, leaves_after
        self._gone = asyncio.Event()
        self._under_way, self.most_under_way = 0, 0

    async def send(self, message: Any) -> None:
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        await asyncio.sleep(self._seconds)
        self._under_way -= 1
        self.sent.append(message.get("body", b"").decode())
        if len(self.sent) == self._leaves_after:
            self._gone.set()

    async def receive(self) -> dict[str, str]:
        await self._gone.wait()
        return {"type": "http.disconnect"}


async def numbers(count: int, seconds: float, log: list[str]) -> AsyncGenerator[str]:
    try:
        for number in range(count):
            await asyncio.sleep(seconds)
            log.append(str(number))
            yield str(number)
    finally:
        log.append("closed")


async def streamed(reader: Reader, events: AsyncGenerator[str], ping_seconds: float = 9.0) -> str:
    ended: list[str] = []

    async def close() -> None:
        ended.append("closed")

    scope = {"type": "http", "method": "GET"}
    await EventStream(events, close, ping_seconds=ping_seconds)(scope, reader.receive, reader.send)
    assert ended == ["closed"]
    return "".join(reader.sent)


def test_pings() -> None:
    """They come again and again while an event is waited for, and no event is lost to them; none where none is due."""
    reader = Reader()

    async def after_pings() -> AsyncGenerator[str]:
        for number in range(2):
            while reader.sent.count(": ping\n\n") < 2 * (number + 1):
                await asyncio.sleep(0.001)
            yield str(number)

    async def session() -> str:
        return await asyncio.wait_for(streamed(reader, after_pings(), ping_seconds=0.01), 60)

    assert asyncio.run(session()).replace(": ping\n\n", "") == "data: 0\n\ndata: 1\n\n"
    assert asyncio.run(streamed(Reader(), numbers(2, 0.0, []))) == "data: 0\n\ndata: 1\n\n"


def test_a_slow_reader_gets_one_piece_at_a_time() -> None:
    """Pings come between events that take longer than a ping may wait, and no event beside a ping."""

    async def session() -> Reader:
        reader = Reader(seconds=0.01)
        await streamed(reader, numbers(10, 0.015, []), ping_seconds=0.002)
        return reader

    reader = asyncio.run(session())
    assert reader.most_under_way == 1
    said = "".join(reader.sent)
    assert ": ping" in said
    assert said.replace(": ping\n\n", "") == "".join(f"data: {number}\n\n" for number in range(10))


LONG, COUNT = "x" * 65_536, 1_000  # 64 MB of events, which no socket's buffers hold


@contextlib.contextmanager
def serving_long_events(log: list[int]) -> Iterator[str]:
    """The address of an app that streams `COUNT` events of 64 KB by uvicorn, and notes in `log` which it has made."""
    app, listening = FastAPI(), bound("127.0.0.1", 0)

    @app.get("/events")
    async def events() -> EventStream:
        async def long() -> AsyncGenerator[str]:
            for number in range(COUNT):
                log.append(number)
                yield LONG

        return EventStream(long(), ping_seconds=9.0)

    @app.get("/other")
    async def other() -> str:
        return "here"

    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield address_of(listening)
    finally:
        server.should_exit = True
        thread.join()


def test_a_reader_that_reads_nothing_holds_its_stream_up_and_nobody_else() -> None:
    """Over a socket: what is made is what buffers hold, until it reads on, and then all comes."""
    log: list[int] = []
    with serving_long_events(log) as url, httpx.Client(base_url=url, timeout=60) as http:
        address, port = url.removeprefix("http://").split(":")
        with socket.create_connection((address, int(port)), timeout=60) as reader:
            reader.sendall(b"GET /events HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            held = 0
            while held < 20:  # answers in a row, of a loop that could have made an event in each of its turns
                before = len(log)
                assert http.get("/other").json() == "here"
                held = held + 1 if log and len(log) == before else 0
            assert 0 < len(log) < COUNT // 2
            received = b"".join(iter(lambda: reader.recv(1 << 20), b""))
        assert received.count(b"data: " + LONG.encode()) == COUNT
        assert len(log) == COUNT


@pytest.mark.parametrize("after", [1, 5])
def test_a_reader_that_leaves(after: int) -> None:
    async def session() -> list[str]:
        log: list[str] = []
        await asyncio.wait_for(streamed(Reader(leaves_after=after), numbers(10**6, 0.001, log)), 5)
        return log

    log = asyncio.run(session())
    assert log == [] or log[-1] == "closed"
    assert len(log) <= after + 2


@pytest.mark.parametrize("error", [APIError(500, "no."), ValueError("secret"), RuntimeError("secret")])
def test_an_error_comes_before_the_end(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def chunks() -> AsyncGenerator[dict[str, Any]]:
        yield {"n": 1}
        raise error

    async def session() -> list[str]:
        return [event async for event in with_end(chunks())]

    first, second, last = asyncio.run(session())
    assert first == '{"n":1}'
    assert second.startswith('{"error":{"message":')
    assert "secret" not in second
    assert last == "[DONE]"
    assert ("A request failed" in caplog.text) == (not isinstance(error, APIError))


def test_records_make_room() -> None:
    """The oldest that have ended go, those under way never."""
    records = Records(most=3, most_bytes=1000)
    running = records.open("running")
    for name in "abcd":
        record = records.open(name)
        record.add({"text": "x"})
        record.end()
    assert records.named("running") is running
    assert records.named("d").events == ['{"text":"x"}']
    for name in "ab":
        with pytest.raises(APIError, match="there are no events of"):
            records.named(name)
    records.named("d").add({"text": "x" * 2000})
    records.open("e")
    with pytest.raises(APIError, match="there are no events of 'd'"):
        records.named("d")
    assert MAX_RECORDS > 3


def test_a_record_is_followed_while_it_grows() -> None:
    async def session() -> list[str]:
        record = Records().open("a")
        record.add({"n": 0})

        async def grow() -> None:
            for number in (1, 2):
                await asyncio.sleep(0.01)
                record.add({"n": number})
            record.end()

        growing = asyncio.create_task(grow())
        events = [event async for event in record.follow()]
        await growing
        assert [event async for event in record.follow()] == events
        return events

    assert asyncio.run(session()) == ['{"n":0}', '{"n":1}', '{"n":2}']
