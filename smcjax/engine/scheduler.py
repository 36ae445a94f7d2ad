"""Which requests run where: admission by memory, lanes, chunks of prompts. Plain Python; the device is not known here.

A group is admitted when a lane and its worst-case pages are free, in the order of arrival: who does not fit waits, and
whoever comes later waits behind. It keeps its lane until it ends, unless the batch changes its size.

Full pages of its prompt that are cached it names instead of making them; those that it makes are cached as soon as the
chunk that fills them is enqueued. A cached page takes one page of memory, whoever uses it. One that nobody uses gives
way to a request that needs it, so the cache makes nobody wait.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from smcjax.engine.prefix_cache import PrefixCache
from smcjax.engine.requests import Request


@dataclasses.dataclass(eq=False)
class Group:
    """An admitted request."""

    request: Request
    lane: int
    prefilled: int = 0  # prompt tokens whose prefill has been scheduled
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of the prompt's full pages
    held: list[bytes] = dataclasses.field(default_factory=list)  # those of them that are cached and name its pages
    slots: list[int] = dataclasses.field(default_factory=list)  # where the pages are that were cached when it joined
    cached: int = 0  # prompt tokens in them

    @property
    def started(self) -> bool:
        """Whether its prompt's prefill has all been scheduled: it takes part in cycles."""
        return self.prefilled >= len(self.request.token_ids)

    @property
    def own_pages(self) -> int:
        """Pages that it may need beside the cached ones."""
        return self.request.worst_case_pages - len(self.held)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What to enqueue, in this order."""

    size: int  # lanes of the batch
    sources: list[int] | None  # of each lane, the lane that its group had before, −1 for none; None: nothing moves
    evicted: list[int]  # cache slots to be emptied
    joining: list[Group]
    prefill: list[tuple[Group, int]]  # and where its next chunk begins
    stored: list[tuple[Group, int, int]]  # pages that these chunks fill, by their number in the prompt, and cache slots
    cycle: bool  # whether a group is there that a cycle advances

    @property
    def idle(self) -> bool:
        """Whether there is nothing to enqueue."""
        return not self.prefill and not self.cycle


class Scheduler:
    """Queue and lanes. `sizes` are those of batches, ascending; `pages` may be held at once; `chunk` prompt tokens.

    `cache` has a slot for each of the pages, or none.
    """

    def __init__(self, sizes: list[int], pages: int, chunk: int, cache: PrefixCache) -> None:
        self.waiting: deque[Request] = deque()
        self.groups: list[Group] = []  # in order of admission
        self.ready: set[int] = set()  # sizes that programs exist for
        self.sizes, self._pages, self._chunk = sizes, pages, chunk
        self.cache = cache
        self._size = 0
        self._next: tuple[Request, list[bytes]] | None = None  # who is to be admitted next, and the keys of its pages

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
                self.cache.release(group.held)
                return group
        return None

    def clear(self) -> None:
        """Forgets everything, lanes included."""
        self.waiting.clear()
        self.groups.clear()
        self.cache.clear()
        self._size = 0

    def schedule(self) -> Schedule:
        """The next enqueueing. What it says to prefill counts as prefilled from now on."""
        joining, evicted = self._admit()
        size, sources = self._resize(len(self.groups) + len(joining))
        free = iter(sorted(set(range(size)) - {group.lane for group in self.groups}))
        for group in joining:
            group.lane = next(free)
        self.groups += joining

        prefill: list[tuple[Group, int]] = []
        stored: list[tuple[Group, int, int]] = []
        for group in self.groups:
            if not group.started:
                prefill.append((group, group.prefilled))
                group.prefilled += self._chunk
                stored += self._store(group)
        cycle = any(group.started for group in self.groups)
        return Schedule(size, sources, evicted, joining, prefill, stored, cycle)

    def _admit(self) -> tuple[list[Group], list[int]]:
        """Groups of those that come next and fit, without lanes yet, and the cache slots that make room for them."""
        joining: list[Group] = []
        evicted: list[int] = []
        free = self._pages - len(self.cache) - sum(group.own_pages for group in self.groups)
        while self.waiting and len(self.groups) + len(joining) < self.sizes[-1]:
            group = self._looked_up(self.waiting[0])
            if group.own_pages > free + self.cache.unused:
                self.cache.release(group.held)
                break
            self.waiting.popleft()
            joining.append(group)
            self.cache.queries += len(group.request.token_ids)
            self.cache.hits += group.cached
            gone = self.cache.evict(max(0, group.own_pages - free))
            evicted, free = evicted + gone, free + len(gone) - group.own_pages
        return joining, evicted

    def _looked_up(self, request: Request) -> Group:
        """The request as a group that holds what is cached of its prompt.

        Its prefill begins where a chunk does that an uncached prompt has too, so each token is computed in the same
        place of the same program and comes out the same to the last bit. The last token is computed in any case: what
        follows it is drawn from its logits.
        """
        if self._next is None or self._next[0] is not request:
            self._next = (request, self.cache.keys(request.token_ids))
        keys = self._next[1]
        held = self.cache.match(keys[: (len(request.token_ids) - 1) // self.cache.page_size])
        cached = len(held) * self.cache.page_size
        prefilled = cached // self._chunk * self._chunk
        return Group(request, -1, prefilled, keys, held, self.cache.hold(held), cached)

    def _store(self, group: Group) -> Iterator[tuple[Group, int, int]]:
        """Caches the full pages that are complete by what has been scheduled of the group's prefill."""
        full = min(group.prefilled // self.cache.page_size, len(group.keys))
        for page in range(max(group.prefilled - self._chunk, group.cached) // self.cache.page_size, full):
            slot = self.cache.insert(group.keys[page])
            if slot is not None:
                group.held.append(group.keys[page])
                yield group, page, slot

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
