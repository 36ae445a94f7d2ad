"""Forms of answers that are being compiled, in a thread of their own: requests without a form never wait for them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from smcjax.engine.llm import LLM
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.server.errors import queue_full

MAX_FORMS = 8  # that are compiled, one at a time, or wait for it


class Forms:
    """Compiles the forms that requests of one server ask for, one after another."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "forms")
        self._pending: set[Future[None]] = set()

    def __len__(self) -> int:
        """The number of forms that are compiled or wait for it."""
        return len(self._pending)

    async def prepare(self, llm: LLM, params: SamplingParams) -> None:
        """Waits until the form that a request asks for is compiled, if it asks for one.

        Raises ValueError where it cannot be, and APIError (429) where `MAX_FORMS` are under way; a form that was asked
        for before comes at once.
        """
        if llm.has_prepared(params):
            return
        if len(self) >= MAX_FORMS:
            raise queue_full(f"{MAX_FORMS} forms of answers may wait to be compiled and as many do; ask again later.")
        future = self._thread.submit(llm.prepare, params)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        await asyncio.wrap_future(future)

    def close(self) -> None:
        """Gives up the forms that wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)
