"""`AsyncLLM`: the engine under asyncio. Steps run in a thread while the event loop serves readers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from smcjax.engine.llm import LLM
from smcjax.engine.outputs import StreamChunk
from smcjax.engine.requests import Prompt, Request, params_for_each
from smcjax.engine.sampling_params import SamplingParams


class AsyncLLM:
    """An `LLM`, of the same arguments, whose `generate` is an async iterator. Of one event loop.

    Requests that come while others run join them at the next cycle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.llm = LLM(*args, **kwargs)
        self._readers: dict[str, asyncio.Queue[StreamChunk | BaseException]] = {}
        self._lock = asyncio.Lock()  # of the engine, which one thread may use at a time
        self._pump: asyncio.Task[None] | None = None

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[StreamChunk]:
        """Yields the answer to one prompt as it becomes certain; the last chunk brings the whole output.

        Raises ValueError at once for a request that cannot run. Who stops iterating (`aclose`, or a cancelled task)
        aborts the request.
        """
        return self._chunks(self.llm.request(prompt, params_for_each(sampling_params, 1)[0]))

    async def _chunks(self, request: Request) -> AsyncIterator[StreamChunk]:
        name, finished = request.request_id, False
        queue = self._readers[name] = asyncio.Queue()
        try:
            async with self._lock:
                self.llm.engine.add_request(request, stream=True)
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._run())
            while not finished:
                item = await queue.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            del self._readers[name]
            async with self._lock:
                if not finished:
                    self.llm.engine.abort(name)
                self.llm.engine.forget(name)

    async def _run(self) -> None:
        """Steps as long as anybody reads."""
        while self._readers:
            try:
                async with self._lock:
                    await asyncio.to_thread(self.llm.engine.step)
                    chunks = {name: self.llm.engine.chunks(name) for name in self._readers}
            except BaseException as error:  # it has ended everything in flight
                for queue in self._readers.values():
                    queue.put_nowait(error)
                return
            for name, some in chunks.items():
                for chunk in some:
                    if name in self._readers:
                        self._readers[name].put_nowait(chunk)
            await asyncio.sleep(0)  # readers first

    async def close(self) -> None:
        """Ends all requests and frees the device memory."""
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump
        async with self._lock:
            self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
