"""`AsyncLLM`: the engine under asyncio. Steps run in a thread while the event loop serves readers.

Readers and the thread meet in two queues: requests that arrive, and the names of those that nobody reads any more. The
thread looks into both before every step, so coming and leaving wait for nothing, not even for a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from smcjax.engine.llm import LLM
from smcjax.engine.outputs import StreamChunk
from smcjax.engine.requests import Prompt, Request, params_for_each
from smcjax.engine.sampling_params import SamplingParams
from smcjax.errors import RequestsLost


class AsyncLLM:
    """An `LLM`, of the same arguments, whose `generate` is an async iterator. Of one event loop.

    Requests that come while others run join them at the next cycle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.llm = LLM(*args, **kwargs)
        self._readers: dict[str, asyncio.Queue[StreamChunk | Exception]] = {}
        self._arriving: deque[tuple[Request, float]] = deque()  # and when they came
        self._leaving: deque[str] = deque()
        self._followed: set[str] = set()  # the thread's: requests that the engine has taken in for a reader
        self._busy = False  # whether the engine has more to do
        self._pump: asyncio.Task[None] | None = None  # runs while there is anything to do
        self._closed = False

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[StreamChunk]:
        """Yields the answer to one prompt as it becomes certain; the last chunk brings the whole output.

        Raises ValueError at once for a request that cannot run. Who stops iterating (`aclose`, or a cancelled task)
        aborts the request.
        """
        return self._chunks(self.llm.request(prompt, params_for_each(sampling_params, 1)[0]))

    async def metrics(self) -> dict[str, float]:
        """`LLM.metrics`, with all that have come and left taken into account."""
        return await asyncio.to_thread(self._metrics)

    async def close(self) -> None:
        """Ends all requests, whose readers get a RuntimeError, and frees the device memory."""
        self._closed = True
        for queue in self._readers.values():
            queue.put_nowait(_closed())
        if self._pump is not None:
            await asyncio.wait([self._pump])  # for the step in progress; cancelled or not, nothing is deleted under it
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # On the event loop.

    async def _chunks(self, request: Request) -> AsyncIterator[StreamChunk]:
        if self._closed:
            raise _closed()
        name, finished = request.request_id, False
        queue = self._readers[name] = asyncio.Queue()
        self._arriving.append((request, time.perf_counter()))
        self._start()
        try:
            while not finished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                finished = item.finished
                yield item
        finally:  # nothing to wait for here: a reader that is cancelled twice must leave nothing behind either
            del self._readers[name]
            self._leaving.append(name)
            self._start()

    def _start(self) -> None:
        if not self._closed and (self._pump is None or self._pump.done()):
            with contextlib.suppress(RuntimeError):  # no event loop any more: nobody is left to serve
                self._pump = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Steps as long as there is anything to do."""
        while not self._closed and (self._arriving or self._leaving or self._busy):
            try:
                chunks, gone = await asyncio.to_thread(self._round)
            except Exception as error:  # it has ended everything in flight
                still_to_come = {request.request_id for request, _ in self._arriving}
                for name in self._readers.keys() - still_to_come:
                    self._readers[name].put_nowait(copy.copy(error))
                continue
            for name, some in chunks.items():
                for chunk in some:
                    if name in self._readers:
                        self._readers[name].put_nowait(chunk)
            for name in gone & self._readers.keys():
                self._readers[name].put_nowait(RequestsLost({name}))

    # In the thread.

    def _round(self) -> tuple[dict[str, list[StreamChunk]], set[str]]:
        """One step; what it has for the readers, by request, and which requests the engine has lost.

        It loses them where a step fails that somebody else took, with the `LLM` that he shares with the readers.
        """
        with self.llm.turn:
            self._busy = False  # also where what follows fails: nothing is in flight then
            engine = self._exchange()
            if engine.busy:
                self.llm.advance(engine)
            self._busy = engine.busy
            gone = {name for name in self._followed if not engine.follows(name)}
            self._followed -= gone
            return {name: engine.chunks(name) for name in list(self._readers)}, gone

    def _exchange(self) -> Any:
        """Takes in who has arrived and lets go who has left; returns the engine."""
        arriving = [self._arriving.popleft() for _ in range(len(self._arriving))]  # also where the LLM is closed
        engine = self.llm.engine
        for request, arrived in arriving:
            engine.add_request(request, stream=True, arrived=arrived)
            self._followed.add(request.request_id)
        while self._leaving:
            name = self._leaving.popleft()
            engine.abort(name)
            engine.forget(name)
            self._followed.discard(name)
        return engine

    def _metrics(self) -> dict[str, float]:
        with self.llm.turn:
            self._exchange()
            return self.llm.metrics()


def _closed() -> RuntimeError:
    return RuntimeError("this AsyncLLM is closed; make a new one.")
