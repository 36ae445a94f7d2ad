"""Requests that somebody waits for, and what becomes of them once nobody does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from smcjax.engine.engine import Engine
from smcjax.engine.results.outputs import StreamChunk


class Served(Protocol):
    """Names the parts of an `LLM` that a claim needs; its own methods say more."""

    @property
    def _turn(self) -> AbstractContextManager[Any, Any]: ...

    @property
    def engine(self) -> Engine: ...

    def _give_up(self, request_ids: Sequence[str]) -> None: ...

    def _let_go(self) -> None: ...

    def _advance_for(self, engine: Engine, awaited: set[str]) -> None: ...


class Claim:
    """Requests that somebody waits for. Closed, or left by whoever had it, it aborts those that have not ended."""

    held = False

    def __init__(self, llm: Served, request_ids: Sequence[str]) -> None:
        self._llm, self._request_ids = llm, request_ids
        self.held = True

    def close(self) -> None:
        """Aborts the requests that have not ended, once it has the turn."""
        if self.held:
            self.give_up()
            with self._llm._turn:
                self._llm._let_go()

    def give_up(self) -> None:
        """Notes, without waiting for the turn, that nobody waits: who has it next aborts the requests."""
        if self.held:
            self._llm._give_up(self._request_ids)
            self.held = False

    def __del__(self) -> None:
        self.give_up()  # collected at any time, in the middle of a step too


class Chunks(Claim, Iterator[StreamChunk]):
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
