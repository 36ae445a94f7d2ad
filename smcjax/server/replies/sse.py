"""Server-sent events: a response that is written as it comes, pings while it waits, and ends when its reader goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from smcjax.server.errors import dumps, refusal

DONE = "[DONE]"


class ClientGone(Exception):
    """Nobody is left to read the answer."""


class EventStream(Response):
    """Writes each item of `events` as the data of one event; closes `events` at the end, or once the client goes.

    `close`, if given, is called then, also where `events` have not begun. `waiting` is the comment that is written
    while `events` have nothing to say.
    """

    def __init__(
        self,
        events: AsyncGenerator[str],
        close: Callable[[], Awaitable[None]] | None = None,
        *,
        ping_seconds: float,
        waiting: Callable[[], str] = lambda: "ping",
    ) -> None:
        unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=unbuffered)
        del self.headers["content-length"]
        self._events, self._close, self._ping_seconds, self._waiting = events, close, ping_seconds, waiting
        self._writing = asyncio.Lock()  # held while a piece is on its way
        self._wrote = time.monotonic()  # the last one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self._end(send) if scope["method"] == "HEAD" else self._write(send))
        finally:
            await self._events.aclose()
            if self._close is not None:
                await self._close()

    async def _write(self, send: Send) -> None:
        pings = asyncio.create_task(self._ping(send))
        try:
            async for event in self._events:
                async with self._writing:
                    await self._put(send, f"data: {event}\n\n")
        finally:
            await _cancelled(pings)
        await self._end(send)

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Writes a comment whenever nothing has been written for `ping_seconds`."""
        while True:
            await asyncio.sleep(max(self._wrote + self._ping_seconds - time.monotonic(), 0.0))
            async with self._writing:  # a slow reader has what is on its way first
                if time.monotonic() - self._wrote >= self._ping_seconds:
                    await self._put(send, f": {self._waiting()}\n\n")

    async def _put(self, send: Send, text: str) -> None:
        """Writes `text`. The caller has `_writing`: no piece begins while another is on its way."""
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        self._wrote = time.monotonic()


async def unless_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, of a request whose body `receive` has given.

    Raises ClientGone, and cancels the work, once the client has left.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancelled(task)
        await _cancelled(gone)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Ends a task and waits until it has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def with_end(chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    """The chunks of a stream as JSON, an error in place of those that fail, and [DONE] once behind them."""
    try:
        async for chunk in chunks:
            yield dumps(chunk)
    except Exception as error:
        yield dumps(refusal(error).body())
    finally:
        await chunks.aclose()
    yield DONE


async def answered(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """The response to a request, whole or ready to be streamed; it is given up once the client has left."""
    try:
        return await unless_gone(request.receive, answer)
    except ClientGone:
        return Response(status_code=499)
