"""Chooses which requests run, in which slots, and which chunks of prompts come next. Plain Python, no device.

Requests are admitted in the order of `smcjax.engine.schedule.rounds`, in which calls take turns: a request that does
not fit waits, and all others wait behind it. A group keeps its slot until it ends, unless the batch changes its size.
There are two rules of admission:

    worst case    a slot is free, and so are the pages that the request can name at most, ever
    optimistic    a slot is free, and so is the fraction of those pages that groups have used recently

A cycle is scheduled only if there are as many pages as it can take (`smcjax.engine.schedule.page_budget`), so no
allocation ever fails. By the first rule there always are. By the second, if there may be too few, all reports are read,
so that the number of free pages is known instead of bounded. If it is still too small, the youngest group is
*preempted*: it leaves, waits as the first in the queue, and starts again. Then no request is admitted optimistically
until a group has ended. The oldest group is never preempted, and alone it always fits, so every request ends.

A group names cached full pages of its prompt instead of making them. The pages that it makes are cached as soon as the
chunk that fills them is enqueued. A cached page takes one page of memory, however many groups use it. A cached page
that no group uses is evicted for a request that needs memory, so the cache makes no request wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from smcjax.engine.requests.requests import Request
from smcjax.engine.schedule.page_budget import Footprint, FreePages, Mark
from smcjax.engine.schedule.prefix_cache import PrefixCache
from smcjax.engine.schedule.rounds import Rounds

FEW = 4  # up to one unread prompt for this many slots, prompts are read one after the other


@dataclasses.dataclass(eq=False)
class Group:
    """An admitted request."""

    request: Request
    slot: int
    prefilled: int = 0  # prompt tokens whose prefill has been scheduled
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of the prompt's full pages
    held: list[bytes] = dataclasses.field(default_factory=list)  # those of `keys` whose cached pages it uses
    # Cache slots of the pages that were cached when the group joined.
    cache_slots: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # prompt tokens in them
    cycles: int = 0  # scheduled for it so far
    waits: bool = False  # takes no cycle now: what text potentials say of it is not known yet

    @property
    def started(self) -> bool:
        """True once all of the prompt's prefill has been scheduled: the group takes part in cycles."""
        return self.prefilled >= len(self.request.token_ids)

    @property
    def cycles_now(self) -> bool:
        """True where the next cycle is one of the group's."""
        return self.started and not self.waits

    @property
    def own_pages(self) -> int:
        """Pages that the group may need beside the cached ones."""
        return self.request.worst_case_pages - len(self.held)


class ChunkLengths(NamedTuple):
    """Prompt tokens of a group that are read between two cycles.

    One program reads a chunk of one prompt, another a chunk of every slot's prompt. The second takes as long for few
    prompts as for many. So few prompts are read one after the other, in longer chunks while enough of a prompt is left:
    each chunk streams all weights once, whatever its length.
    """

    together: int
    alone: int
    one_slot: bool = True  # whether there is the first program; else the second reads a prompt by itself too

    def slots(self, prompts: int, size: int) -> int:
        """The number of slots of the program that reads this many prompts of a batch of `size`."""
        return 1 if prompts == 1 and self.one_slot else size

    def of(self, left: int, *, few: bool) -> int:
        """The length of the next chunk of a prompt with `left` unread tokens; `few`: it is one of few prompts."""
        return self.alone if few and 2 * left > self.alone else self.together


class Reading(NamedTuple):
    """A chunk of a group's prompt."""

    group: Group
    start_at: int
    length: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The programs to enqueue in one round, in this order."""

    size: int  # slots of the batch
    preempted: list[Group] = dataclasses.field(default_factory=list)  # groups that leave; then nothing else is enqueued
    sources: list[int] | None = None  # for each new slot, its group's old slot or −1; None: no group moves
    evicted: list[int] = dataclasses.field(default_factory=list)  # cache slots to be emptied
    joining: list[Group] = dataclasses.field(default_factory=list)
    prefill: list[list[Reading]] = dataclasses.field(default_factory=list)  # each list in one program
    # Pages that these chunks fill: group, number in the prompt, and the cache slot that will keep the page.
    stored: list[tuple[Group, int, int]] = dataclasses.field(default_factory=list)
    cycle: bool = False  # whether a cycle follows, for the groups that have started

    @property
    def idle(self) -> bool:
        """True if this round enqueues no program that reports: then all earlier reports are read."""
        return not self.prefill and not self.cycle


class Scheduler:
    """The queue of waiting requests, and the groups in their slots.

    Args:
        sizes: slots of batches, ascending.
        pages: KV pages of the device, without the trash page.
        chunks: prompt tokens of a group that are prefilled between two cycles.
        cache: of prompts, with a cache slot for each of the pages, or none.
        footprint: bounds on the pages of a group.
        optimistic: the rule of admission.
    """

    def __init__(
        self,
        sizes: list[int],
        pages: int,
        chunks: ChunkLengths,
        cache: PrefixCache,
        footprint: Footprint,
        *,
        optimistic: bool = False,
    ) -> None:
        self.waiting = Rounds()
        self.groups: list[Group] = []  # in order of admission
        self.ready: set[int] = set()  # batch sizes with compiled programs
        self.lacking: list[Request] = []  # requests that waited in the last round for programs to be compiled
        self.sizes, self._pages, self.chunks = sizes, pages, chunks
        self.cache, self.free = cache, FreePages(pages)
        self._footprint, self._optimistic = footprint, optimistic
        self._wary = False  # a group was preempted, and none has ended since
        self._size = 0
        # The next request to be admitted, and the keys of its pages.
        self._next: tuple[Request, list[bytes]] | None = None

    def __bool__(self) -> bool:
        """True while anything waits or runs."""
        return bool(self.waiting or self.groups)

    def add(self, request: Request) -> None:
        """Queues a request, whose worst case must fit."""
        self.waiting.add(request)

    def withdraw(self, request_id: str) -> Group | Request | None:
        """Takes a request out: as its group if it was admitted, as itself if it waited. None for unknown ids."""
        request = self.waiting.withdraw(request_id)
        if request is not None:
            return request
        for group in self.groups:
            if group.request.request_id == request_id:
                self.groups.remove(group)
                self.cache.release(group.held)
                self._wary = False
                return group
        return None

    def clear(self) -> None:
        """Forgets everything, slots included."""
        self.waiting.clear()
        self.groups.clear()
        self.lacking = []
        self.cache.clear()
        self.free.clear()
        self._wary = False
        self._size = 0

    def schedule(self, compiled: Callable[[list[Request]], list[int]] | None = None) -> Schedule:
        """The next round. Chunks in it count as prefilled from now on.

        `compiled` maps requests to the batch sizes, ascending, whose compiled programs can run them together. A request
        without such a program waits, and others are admitted before it. None: programs are compiled when needed.
        """
        if self._spare(self.groups) + self.cache.unused < 0:
            return Schedule(self._size, preempted=[] if self.free.unread else [self._preempt()])
        joining, evicted = self._admit(compiled)
        requests = [group.request for group in (*self.groups, *joining)]
        size, sources = self._resize(len(requests), [] if compiled is None or not requests else compiled(requests))
        free = iter(sorted(set(range(size)) - {group.slot for group in self.groups}))
        for group in joining:
            group.slot = next(free)
        self.groups += joining

        unread = [group for group in self.groups if not group.started]
        few = len(unread) <= max(1, size // FEW)
        readings: list[Reading] = []
        stored: list[tuple[Group, int, int]] = []
        for group in unread:
            length = self.chunks.of(len(group.request.token_ids) - group.prefilled, few=few)
            readings.append(Reading(group, group.prefilled, length))
            group.prefilled += length
            stored += self._store(*readings[-1])
        prefill = [[one] for one in readings] if few else [readings]
        cycle = [group for group in self.groups if group.cycles_now]
        self.free.take(sum(self._need(group) for group in cycle))
        for group in cycle:
            group.cycles += 1
        return Schedule(size, [], sources, evicted, joining, prefill, stored, bool(cycle))

    def mark(self) -> Mark:
        """Marks the program that is enqueued now; `free.report` takes the mark with the program's report."""
        used = len(self.cache) - self.cache.unused
        return self.free.mark(used + sum(group.own_pages for group in self.groups), self.cache.unused)

    def _need(self, group: Group) -> int:
        """Upper bound on the pages that the group's next cycle takes."""
        request = group.request
        ragged = bool(request.params.control)
        return self._footprint.need(len(request.token_ids), request.limit, group.cycles, ragged=ragged)

    def _ceiling(self, group: Group, cycles: int) -> int:
        """Upper bound on the group's pages after `cycles` cycles, beside the cached ones."""
        ceiling = self._footprint.ceiling(len(group.request.token_ids), group.request.limit, cycles)
        return min(ceiling, group.request.worst_case_pages) - len(group.held)

    def _spare(self, groups: Iterable[Group]) -> int:
        """Lower bound on the pages that are free after the next cycle of these groups alone.

        A result of 0 or more says that the pages suffice, not by how much. Pages that only the cache keeps do not count
        as free. A group without a slot counts with all pages that it takes until the end of that cycle.
        """
        groups = list(groups)
        joining = sum(self._ceiling(group, 0) for group in groups if group.slot < 0)
        by_report = self.free.at_least - joining - sum(self._need(group) for group in groups)
        if by_report >= 0:  # the usual case
            return by_report
        by_ceiling = self._pages - len(self.cache) - sum(self._ceiling(group, group.cycles + 1) for group in groups)
        return max(by_report, by_ceiling)

    def _admit(self, compiled: Callable[[list[Request]], list[int]] | None) -> tuple[list[Group], list[int]]:
        """The next requests that fit, as groups without slots, and the cache slots to evict for them."""
        joining: list[Group] = []
        lacking: list[Request] = []
        for request in self.waiting:
            together = [group.request for group in (*self.groups, *joining)] + [request]
            if len(together) > self.sizes[-1]:
                break
            if compiled is not None and len(together) > max(compiled(together), default=0):
                lacking.append(request)
                continue
            group = self._looked_up(request)
            if not self._fits([*self.groups, *joining, group]):
                self.cache.release(group.held)
                break
            joining.append(group)
            self.cache.queries += len(group.request.token_ids)
            self.cache.hits += group.cached
        self.lacking = lacking
        for group in joining:
            self.waiting.admit(group.request)
        evicted = self.cache.evict(max(0, -self._spare([*self.groups, *joining])))
        self.free.take(sum(self._ceiling(group, 0) for group in joining) - len(evicted))
        return joining, evicted

    def _fits(self, groups: Sequence[Group]) -> bool:
        """True if these groups may run together once all cached pages that they do not use are evicted."""
        worst, pages = sum(group.own_pages for group in groups), self._pages - len(self.cache) + self.cache.unused
        if worst <= pages:
            return True
        if not self._optimistic or self._wary:
            return False
        return self.free.utilization * worst <= pages and self._spare(groups) + self.cache.unused >= 0

    def _preempt(self) -> Group:
        """Takes the youngest group out of its slot and puts its request back, to be the next."""
        group = self.groups.pop()
        self.cache.release(group.held)
        self.waiting.put_back(group.request)
        self._wary = True
        return group

    def _looked_up(self, request: Request) -> Group:
        """The request as a group that holds the cached pages of its prompt.

        Its prefill starts at a chunk boundary of an uncached prompt. With chunks of one length, each token is then
        computed at the same place of the same program, with the same bits. The last prompt token is always computed, as
        the first new token is drawn from its logits. A request with `prompt_logprobs` uses no cached pages, as these
        hold no log-probabilities.
        """
        if self._next is None or self._next[0] is not request:
            self._next = (request, self.cache.keys(request.token_ids))
        keys = self._next[1]
        matching = keys[: (len(request.token_ids) - 1) // self.cache.page_size]
        held = [] if request.params.prompt_logprobs is not None else self.cache.match(matching)
        cached = len(held) * self.cache.page_size
        prefilled = cached // self.chunks.together * self.chunks.together
        return Group(request, -1, prefilled, keys, held, self.cache.hold(held), cached)

    def _store(self, group: Group, start_at: int, length: int) -> Iterator[tuple[Group, int, int]]:
        """Caches the full pages that this chunk of the group's prompt completes."""
        full = min((start_at + length) // self.cache.page_size, len(group.keys))
        for page in range(max(start_at, group.cached) // self.cache.page_size, full):
            cache_slot = self.cache.insert(group.keys[page])
            if cache_slot is not None:
                group.held.append(group.keys[page])
                yield group, page, cache_slot

    def _resize(self, count: int, compiled: Sequence[int]) -> tuple[int, list[int] | None]:
        """The batch size for `count` groups, and its `Schedule.sources`. On a change, groups move to the first slots.

        It is the smallest sufficient size in `compiled`, or of all sizes if none there suffices. While groups run, the
        batch shrinks only to a size that is ready, since a smaller batch saves less than a compilation costs.
        """
        if not count:
            return self._size, None
        fitting = [size for size in compiled if size >= count] or [size for size in self.sizes if size >= count]
        size = fitting[0]
        if self.groups and size < self._size and not compiled:
            size = next(size for size in fitting if size in self.ready or size == self._size)
        if size == self._size:
            return size, None
        sources = [group.slot for group in self.groups] + [-1] * (size - len(self.groups))
        for slot, group in enumerate(self.groups):
            group.slot = slot
        self._size = size
        return size, sources
