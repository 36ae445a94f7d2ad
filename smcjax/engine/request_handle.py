"""Requests that a caller waits for, and what becomes of them once it has left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from smcjax.engine.engine import Engine
from smcjax.engine.results.outputs import StreamChunk


class Served(Protocol):
    """Names the parts of an `LLM` that a request handle needs; its own methods say more."""

    @property
    def _turn(self) -> AbstractContextManager[Any, Any]: ...

    @property
    def engine(self) -> Engine: ...

    def _cancel(self, request_ids: Sequence[str]) -> None: ...

    def _abort_cancelled(self) -> None: ...

    def _advance_for(self, engine: Engine, awaited: set[str]) -> None: ...


class RequestHandle:
    """Requests that a caller waits for. Closed, or garbage-collected, it aborts those that have not ended."""

    held = False

    def __init__(self, llm: Served, request_ids: Sequence[str]) -> None:
        self._llm, self._request_ids = llm, request_ids
        self.held = True

    def close(self) -> None:
        """Aborts the requests that have not ended, once it has the turn."""
        if self.held:
            self.cancel()
            with self._llm._turn:
                self._llm._abort_cancelled()

    def cancel(self) -> None:
        """Notes, without waiting for the lock, that the caller has left: the next step aborts the requests."""
        if self.held:
            self._llm._cancel(self._request_ids)
            self.held = False

    def __del__(self) -> None:
        self.cancel()  # collected at any time, in the middle of a step too


class Chunks(RequestHandle, Iterator[StreamChunk]):
    """The stream of one request."""

    def __init__(self, llm: Served, request_id: str) -> None:
        super().__init__(llm, [request_id])
        self._ready: deque[StreamChunk] = deque()

    def __next__(self) -> StreamChunk:
        if not self.held:
            raise StopIteration
        (request_id,) = self._request_ids
        try:
            while not self._ready:
                with self._llm._turn:
                    engine = self._llm.engine
                    self._ready += engine.chunks(request_id)
                    if not self._ready:
                        self._llm._advance_for(engine, {request_id})
        except BaseException:
            self.close()
            raise
        chunk = self._ready.popleft()
        if chunk.finished:
            self.close()
        return chunk
