"""Which requests run where: admission by memory, lanes, chunks of prompts. Plain Python; the device is not known here.

A group is admitted when a lane and its worst-case pages are free, in the order of arrival: who does not fit waits, and
whoever comes later waits behind. It keeps its lane until it ends, unless the batch changes its size.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from smcjax.engine.requests import Request


@dataclasses.dataclass(eq=False)
class Group:
    """An admitted request."""

    request: Request
    lane: int
    prefilled: int = 0  # prompt tokens whose prefill has been scheduled

    @property
    def started(self) -> bool:
        """Whether its prompt's prefill has all been scheduled: it takes part in cycles."""
        return self.prefilled >= len(self.request.token_ids)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What to enqueue, in this order."""

    size: int  # lanes of the batch
    sources: list[int] | None  # of each lane, the lane that its group had before, −1 for none; None: nothing moves
    joining: list[Group]
    prefill: list[tuple[Group, int]]  # and where its next chunk begins
    cycle: bool  # whether a group is there that a cycle advances

    @property
    def idle(self) -> bool:
        """Whether there is nothing to enqueue."""
        return not self.prefill and not self.cycle


class Scheduler:
    """Queue and lanes. `sizes` are those of batches, ascending; `pages` may be held at once; `chunk` prompt tokens."""

    def __init__(self, sizes: list[int], pages: int, chunk: int) -> None:
        self.waiting: deque[Request] = deque()
        self.groups: list[Group] = []  # in order of admission
        self.ready: set[int] = set()  # sizes that programs exist for
        self.sizes, self._pages, self._chunk = sizes, pages, chunk
        self._size = 0

    def __bool__(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.groups)

    def add(self, request: Request) -> None:
        """Queues a request, whose worst case must fit."""
        self.waiting.append(request)

    def withdraw(self, request_id: str) -> Group | Request | None:
        """Takes a request out: as its group if it was admitted, as itself if it waited. None for unknown ids."""
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return request
        for group in self.groups:
            if group.request.request_id == request_id:
                self.groups.remove(group)
                return group
        return None

    def clear(self) -> None:
        """Forgets everything, lanes included."""
        self.waiting.clear()
        self.groups.clear()
        self._size = 0

    def schedule(self) -> Schedule:
        """The next enqueueing. What it says to prefill counts as prefilled from now on."""
        joining = list(self._admit())
        size, sources = self._resize(len(self.groups) + len(joining))
        free = iter(sorted(set(range(size)) - {group.lane for group in self.groups}))
        for group in joining:
            group.lane = next(free)
        self.groups += joining

        prefill = []
        for group in self.groups:
            if not group.started:
                prefill.append((group, group.prefilled))
                group.prefilled += self._chunk
        return Schedule(size, sources, joining, prefill, cycle=any(group.started for group in self.groups))

    def _admit(self) -> Iterator[Group]:
        lanes = self.sizes[-1] - len(self.groups)
        pages = self._pages - sum(group.request.worst_case_pages for group in self.groups)
        while self.waiting and lanes and self.waiting[0].worst_case_pages <= pages:
            request = self.waiting.popleft()
            lanes, pages = lanes - 1, pages - request.worst_case_pages
            yield Group(request, lane=-1)

    def _resize(self, count: int) -> tuple[int, list[int] | None]:
        """The size for `count` groups. Where it changes, those that have lanes move to the first ones.

        While groups run the batch shrinks only to a size that is ready: what it saves is less than a compilation.
        """
        if not count:
            return self._size, None
        fitting = [size for size in self.sizes if size >= count]
        size = fitting[0]
        if self.groups and size < self._size:
            size = next(size for size in fitting if size in self.ready or size == self._size)
        if size == self._size:
            return size, None
        sources = [group.lane for group in self.groups] + [-1] * (size - len(self.groups))
        for lane, group in enumerate(self.groups):
            group.lane = lane
        self._size = size
        return size, sources
