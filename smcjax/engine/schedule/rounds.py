"""Requests that wait, in rounds: a round holds at most one request of each call, so that large calls let others pass.

A call is the requests that come together: the prompts of one `LLM.generate`, or all answers of one HTTP request. Its
requests join the rounds that have not begun, one each, in their order. Rounds are admitted one after the other, and
within a round the request that came first. So, while a call's first request waits,

    no request that comes later is admitted before it;
    at most two requests of every other call are: one of the round that has begun, one of the next.

A round that has begun takes no request in, so it ends, and no request waits for ever behind ones that come later.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from smcjax.engine.requests.requests import Request


class Rounds:
    """The queue of a `smcjax.engine.schedule.scheduler.Scheduler`; iterates in the order of admission."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all requests."""
        self._queue: list[tuple[int, int, Request]] = []  # sorted by round and arrival
        self._latest: dict[str, int] = {}  # the last round that a call's waiting requests are in
        self._begun = 0  # the round of the request that was admitted last
        self._count = 0  # of all that have come

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._queue)

    def add(self, request: Request) -> None:
        """Queues a request in the first round that has not begun and holds none of its call, nor does a later one."""
        after = max(self._begun, self._latest.get(request.call, 0))
        self._latest[request.call] = after + 1
        self._count += 1
        bisect.insort(self._queue, (after + 1, self._count, request))  # counts differ: requests are never compared

    def put_back(self, request: Request) -> None:
        """Queues a request that was admitted before as the first of all."""
        self._count += 1
        self._queue.insert(0, (0, -self._count, request))

    def admit(self, request: Request) -> None:
        """Takes a waiting request out, whose round has begun from now on."""
        self._begun = max(self._begun, self._take(request.request_id)[0])

    def withdraw(self, request_id: str) -> Request | None:
        """Takes a request out that is not to be admitted. None for ids that do not wait."""
        waits = any(request.request_id == request_id for request in self)
        return self._take(request_id)[-1] if waits else None

    def _take(self, request_id: str) -> tuple[int, int, Request]:
        index = next(at for at, entry in enumerate(self._queue) if entry[-1].request_id == request_id)
        taken = self._queue.pop(index)
        if all(request.call != taken[-1].call for request in self):
            self._latest.pop(taken[-1].call, None)
        return taken
