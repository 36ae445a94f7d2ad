"""Who runs where: plain Python, so thousands of random histories are cheap."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

import smcjax
from smcjax.engine.requests.requests import Request
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.engine.schedule.prefix_cache import PrefixCache
from smcjax.engine.schedule.scheduler import ChunkLengths, Group, Schedule, Scheduler

pytestmark = pytest.mark.all_sizes

CHUNK, PAGES, PAGE_SIZE = 8, 20, 3
ALONE = Footprint(rows=1, page_size=PAGE_SIZE, width=1)
SIZES = [1, 2, 4]
SAME = ChunkLengths(together=CHUNK, alone=CHUNK)


def request(number: int, tokens: int = 5, pages: int = 4) -> Request:
    return Request(str(number), None, [1] * tokens, SamplingParams(), 40, (), 0, pages)


def ids(groups: list[Group]) -> list[str]:
    return [group.request.request_id for group in groups]


def ids_of(requests: list[Request]) -> list[str]:
    return [one.request_id for one in requests]


def readings(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    return [[(group.request.request_id, *chunk) for group, *chunk in program] for program in schedule.prefill]


def scheduler(*requests: Request) -> Scheduler:
    made = Scheduler(SIZES, PAGES, SAME, PrefixCache(0, PAGE_SIZE), ALONE)
    for one in requests:
        made.add(one)
    return made


def test_what_schedules_imports_no_jax() -> None:
    root = Path(smcjax.__file__).parent.parent
    seen, todo = set(), ["smcjax.engine.schedule.scheduler"]
    while todo:
        name = todo.pop()
        path = root / (name.replace(".", "/") + ".py")
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not [module for module in names if module.split(".")[0] in ("jax", "jaxlib")], path
            todo += names
    assert "smcjax.engine.requests.requests" in seen


def test_a_batch_of_the_smallest_size_that_fits() -> None:
    made = scheduler(request(0), request(1), request(2))
    first = made.schedule()
    assert (first.size, first.sources, ids(first.joining)) == (4, [-1] * 4, ["0", "1", "2"])
    assert readings(first) == [[("0", 0, 8), ("1", 0, 8), ("2", 0, 8)]]
    assert first.cycle
    again = made.schedule()
    assert (again.sources, again.joining, again.prefill, again.cycle) == (None, [], [], True)


def test_long_prompts_come_in_chunks_between_cycles() -> None:
    made = scheduler(request(0), request(1, tokens=20))
    histories = [made.schedule() for _ in range(4)]
    assert [readings(one) for one in histories] == [
        [[("0", 0, 8), ("1", 0, 8)]],
        [[("1", 8, 8)]],
        [[("1", 16, 8)]],
        [],
    ]
    assert all(one.cycle for one in histories)  # the short one runs all the while
    assert [group.started for group in made.groups] == [True, True]


def test_few_prompts_are_read_one_by_one_in_long_chunks() -> None:
    """Two prompts count as few in eight slots; a prompt's rest makes a long chunk if it fills more than half of one."""
    made = Scheduler([8], PAGES, ChunkLengths(together=8, alone=32), PrefixCache(0, PAGE_SIZE), ALONE)
    for number, tokens in enumerate((75, 30)):
        made.add(request(number, tokens))
    made.schedule()
    for number in (2, 3):
        made.add(request(number, tokens=20))
    histories = [made.schedule() for _ in range(4)]
    assert [readings(one) for one in histories] == [
        [[("0", 32, 8), ("2", 0, 8), ("3", 0, 8)]],
        [[("0", 40, 8), ("2", 8, 8), ("3", 8, 8)]],
        [[("0", 48, 8), ("2", 16, 8), ("3", 16, 8)]],
        [[("0", 56, 32)]],
    ]
    alone = Scheduler([8], PAGES, ChunkLengths(together=8, alone=32), PrefixCache(0, PAGE_SIZE), ALONE)
    for number, tokens in enumerate((48, 17)):
        alone.add(request(number, tokens))
    assert [readings(alone.schedule()) for _ in range(4)] == [
        [[("0", 0, 32)], [("1", 0, 32)]],
        [[("0", 32, 8)]],
        [[("0", 40, 8)]],
        [],
    ]


def test_nobody_overtakes_a_request_that_waits_for_memory() -> None:
    made = scheduler(request(0, pages=15), request(1, pages=6), request(2, pages=1))
    assert ids(made.schedule().joining) == ["0"]
    assert made.schedule().joining == []
    made.withdraw("0")
    assert ids(made.schedule().joining) == ["1", "2"]


def test_who_lacks_programs_lets_others_pass_and_keeps_its_place() -> None:
    """Request 1 asks for what is compiled for four slots alone, and later than all others."""
    made, sizes = scheduler(*(request(number) for number in range(6))), {"1": list[int]()}

    def compiled(requests: list[Request]) -> list[int]:
        return sizes["1"] if any(one.request_id == "1" for one in requests) else [1, 2, 4]

    first = made.schedule(compiled)
    assert (first.size, ids(first.joining), ids_of(made.lacking)) == (4, ["0", "2", "3", "4"], ["1"])
    made.withdraw("3")
    assert ids(made.schedule(compiled).joining) == ["5"]
    for number in ("0", "2", "4"):
        made.withdraw(number)
    small = made.schedule(compiled)
    assert (small.size, ids(small.joining), ids_of(made.lacking)) == (1, [], ["1"])
    made.add(request(6))
    sizes["1"].append(4)
    both = made.schedule(compiled)
    assert (both.size, ids(both.joining), made.lacking) == (4, ["1", "6"], [])
    made.withdraw("1")
    assert made.schedule(compiled).size == 2


def test_the_batch_shrinks_to_sizes_that_are_ready_and_grows_to_any() -> None:
    made = scheduler(*(request(i) for i in range(4)))
    made.schedule()
    made.ready.add(4)
    for number in ("0", "1", "3"):
        made.withdraw(number)
    assert made.schedule().sources is None  # size 1 would have to be compiled for one request
    made.ready.add(1)
    shrunk = made.schedule()
    assert (shrunk.size, shrunk.sources, made.groups[0].slot) == (1, [2], 0)
    made.add(request(9))
    grown = made.schedule()
    assert (grown.size, grown.sources, [group.slot for group in made.groups]) == (2, [0, -1], [0, 1])


def test_withdrawing() -> None:
    made = scheduler(request(0), request(1, pages=20))
    made.schedule()
    group, waiting = made.withdraw("0"), made.withdraw("1")
    assert isinstance(group, Group)
    assert isinstance(waiting, Request)
    assert made.withdraw("1") is None
    assert not made
    assert made.schedule().idle


class Slots:
    """A stand-in for a device's cache slots keeps each page as all tokens up to the page's end."""

    def __init__(self) -> None:
        self.pages: dict[int, list[int]] = {}

    def follow(self, schedule: Schedule) -> None:
        for cache_slot in schedule.evicted:
            del self.pages[cache_slot]
        for group in schedule.joining:
            token_ids = group.request.token_ids
            assert group.cached == len(group.cache_slots) * PAGE_SIZE < len(token_ids)
            assert [self.pages[cache_slot] for cache_slot in group.cache_slots] == [
                token_ids[:end] for end in range(PAGE_SIZE, group.cached + 1, PAGE_SIZE)
            ]
        ends = {group: at + length for program in schedule.prefill for group, at, length in program}
        for group, page, cache_slot in schedule.stored:
            end = (page + 1) * PAGE_SIZE
            assert group.cached < end <= min(ends[group], len(group.request.token_ids))
            assert cache_slot not in self.pages
            self.pages[cache_slot] = group.request.token_ids[:end]
        assert len({tuple(page) for page in self.pages.values()}) == len(self.pages)  # nothing twice


@pytest.mark.parametrize("cache_slots", [0, PAGES])
@pytest.mark.parametrize("ready", [True, False])
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, PAGES)),
            st.tuples(st.just("end"), st.integers(0, 100), st.just(0)),
            st.tuples(st.just("schedule"), st.just(0), st.just(0)),
        ),
        max_size=80,
    )
)
def test_any_history_is_sound(ready: bool, cache_slots: int, events: list[tuple[str, int, int]]) -> None:
    made = Scheduler(SIZES, PAGES, ChunkLengths(CHUNK, 2 * CHUNK), PrefixCache(cache_slots, PAGE_SIZE), ALONE)
    if ready:
        made.ready |= set(SIZES)
    size, count, device = 0, 0, Slots()
    slots: dict[str, int] = {}
    admitted: list[int] = []
    progress: dict[str, int] = {}
    for event, a, b in [*events, *[("schedule", 0, 0)] * 8]:
        if event == "add":
            token_ids = ([0] * 7 + [a % 3] * 30)[:a]
            made.add(dataclasses.replace(request(count, pages=max(b, 1 + a // PAGE_SIZE)), token_ids=token_ids))
            count += 1
        elif event == "end" and made.groups:
            gone = made.groups[a % len(made.groups)].request.request_id
            made.withdraw(gone)
            del slots[gone]
        elif event == "schedule":
            schedule = made.schedule()
            device.follow(schedule)
            if schedule.sources is not None:
                assert schedule.size in SIZES
                assert len(schedule.sources) == schedule.size
                stayed = [group for group in made.groups if group not in schedule.joining]
                for group in stayed:
                    assert schedule.sources[group.slot] == slots[group.request.request_id]
                assert sorted(x for x in schedule.sources if x >= 0) == sorted(slots.values())
                size = schedule.size
            assert schedule.size == size
            admitted += [int(group.request.request_id) for group in schedule.joining]
            if made.waiting:
                # Without a cache it would not fit either.
                free = PAGES - sum(group.request.worst_case_pages for group in made.groups)
                assert len(made.groups) == SIZES[-1] or next(iter(made.waiting)).worst_case_pages > free
            for group, at, length in itertools.chain(*schedule.prefill):
                name = group.request.request_id
                assert at == progress.get(name, group.cached // CHUNK * CHUNK) < len(group.request.token_ids)
                progress[name] = at + length
            assert all(len({length for *_, length in program}) == 1 for program in schedule.prefill)
            slots = {group.request.request_id: group.slot for group in made.groups}
        used = len(made.cache) - made.cache.unused
        assert used + sum(group.own_pages for group in made.groups) <= PAGES
        held = {key for group in made.groups for key in group.held}
        assert len(made.cache) == len(device.pages) == made.cache.unused + len(held)
        assert len(set(slots.values())) == len(slots)
        assert all(0 <= slot < size for slot in slots.values())
    assert admitted == list(range(len(admitted)))  # first come, first served
    assert all(group.started for group in made.groups)


def test_what_was_used_least_recently_goes_first() -> None:
    cache = PrefixCache(8, 2)
    first, second = cache.keys([1, 1, 2, 2, 3, 3]), cache.keys([1, 1, 9, 9, 3, 3, 4])
    assert first[0] == second[0]
    assert len({*first, *second}) == 5  # the same page behind another beginning is another one
    cache_slots = {key: cache.insert(key) for key in [*first, second[1]]}
    assert cache.insert(first[1]) is None
    cache.hold(second[:1])
    cache.release(second[1:2])
    cache.release(first)
    assert cache.unused == 3  # the other is held
    assert cache.match(first) == first
    assert cache.match(second) == second[:2]
    assert cache.evict(1) == [cache_slots[second[1]]]
    cache.hold(first[:2])
    assert cache.evict(9) == [cache_slots[first[2]]]
    assert cache.match(first) == first[:2]
    cache.release(first[:2])
    assert cache.evict(1) == [cache_slots[first[1]]]
    cache.release(second[:1])
    assert cache.evict(9) == [cache_slots[first[0]]]
    assert (len(cache), cache.unused, cache.match(first)) == (0, 0, [])


def test_a_cached_page_gives_way_to_who_needs_it() -> None:
    made = Scheduler(SIZES, 14, SAME, PrefixCache(14, PAGE_SIZE), ALONE)
    made.add(request(0, tokens=9, pages=14))
    made.schedule()
    made.schedule()
    made.withdraw("0")
    assert len(made.cache) == made.cache.unused == 3
    made.add(dataclasses.replace(request(1, tokens=8, pages=14), token_ids=[1] * 6 + [2] * 2))
    schedules = [made.schedule() for _ in range(32)]
    assert (ids(schedules[0].joining), made.groups[0].cached) == (["1"], 6)
    # Two of the three it uses; the last goes when it may have 14 pages, at its cap of 40 tokens.
    assert [len(schedule.evicted) for schedule in schedules] == [0] * 31 + [1]
    assert (made.cache.queries, made.cache.hits) == (17, 6)
