"""Optimistic admission: no allocation fails however few pages there are, and who is preempted gives the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from smcjax import LLM, RequestOutput, SamplingParams
from smcjax.engine.engine import Engine
from smcjax.engine.requests.requests import Request
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.engine.schedule.prefix_cache import PrefixCache
from smcjax.engine.schedule.scheduler import ChunkLengths, Scheduler
from tests.checkpoints import Pair
from tests.engine.conftest import lend, smc_llm
from tests.engine.test_engine import fingerprint, prompt, sound

pytestmark = pytest.mark.all_sizes

ROWS, WIDTH, PAGE_SIZE = 4, 4, 4
COUNT = 10  # different requests
PAGES = 100


def params(number: int) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=8 + number * 7 % 19, ignore_eos=number % 2 == 0)


def worst(number: int) -> int:
    length = len(prompt(number)["prompt_token_ids"])
    return Footprint(ROWS, PAGE_SIZE, WIDTH).worst_case(length, length + (params(number).max_tokens or 0))


WORST = max(worst(number) for number in range(COUNT))


@pytest.fixture(scope="module")
def optimist(pair: Pair, llm: LLM) -> Iterator[LLM]:
    """`llm` that admits by what groups use."""
    with smc_llm(pair, admission="optimistic") as optimist:
        optimist.engine.runner.chunks = optimist.engine._scheduler.chunks = ChunkLengths(8, 8)
        yield optimist


@pytest.fixture(scope="module")
def alone(optimist: LLM) -> list[tuple[Any, ...]]:
    return [fingerprint(optimist.generate(prompt(i), params(i), use_tqdm=False)[0]) for i in range(COUNT)]


def safe(engine: Engine) -> None:
    """Counts are sound, every token has its page, and the host's bounds are bounds."""
    state, scheduler = engine.runner.state, engine._scheduler
    if state is None:
        return
    sound(engine)
    table, length = np.asarray(state.sequences.block_table), np.asarray(state.sequences.length)
    running = np.repeat(np.asarray(state.running), ROWS)
    for row in np.flatnonzero(running):
        assert table[row, : -(-(length[row] - 1) // PAGE_SIZE)].all()
    free = int(state.memory.pool.num_free)
    assert free >= scheduler.free.at_least
    ceiling = sum(scheduler._ceiling(group, group.cycles) for group in scheduler.groups)
    assert free >= scheduler._pages - len(scheduler.cache) - ceiling


@pytest.mark.slow
@settings(max_examples=16)
@given(
    pages=st.integers(WORST, 2 * WORST),
    numbers=st.lists(st.integers(0, COUNT - 1), min_size=2, max_size=7),
    every=st.integers(0, 3),
    lag=st.integers(0, 2),
    aborted=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=2),
)
def test_no_allocation_fails_and_every_token_is_as_alone(
    optimist: LLM,
    alone: list[tuple[Any, ...]],
    pages: int,
    numbers: list[int],
    every: int,
    lag: int,
    aborted: list[tuple[int, int]],
) -> None:
    engine = lend(optimist, pages).engine
    engine._lag = lag
    asked: dict[str, int] = {}
    outputs: dict[str, RequestOutput] = {}
    todo = list(numbers)
    for step in range(1000):
        while todo and (not every or step % every == 0):
            request = optimist.request(prompt(todo[0]), params(todo[0]))
            engine.add_request(request, stream=step % 2 == 0)
            asked[request.request_id] = todo.pop(0)
            if every:
                break
        for at, which in aborted:
            if at == step and which < len(asked):
                engine.abort(list(asked)[which])
        outputs |= {output.request_id: output for output in engine.step()}
        safe(engine)
        if not todo and not engine.busy:
            break
    engine._lag = 0
    assert outputs.keys() == asked.keys()
    for name, output in outputs.items():
        answer, chunks = output.outputs[0], engine.chunks(name)
        engine.forget(name)
        assert answer.finish_reason == "abort" or fingerprint(output) == alone[asked[name]]
        assert not chunks or [token for chunk in chunks for token in chunk.token_ids] == answer.token_ids
        assert not chunks or "".join(chunk.text for chunk in chunks) == answer.text
    assert optimist.engine.runner.free_pages() == pages
    assert not engine._running
    assert not engine._preempted


def test_the_young_give_way_and_come_back(
    optimist: LLM, alone: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in memory for the largest: preempted in the middle of their streams, which their readers cannot tell."""
    engine = lend(optimist, WORST).engine
    monkeypatch.setattr(engine, "_lag", 1)
    before = optimist.metrics()
    numbers = sorted(range(COUNT), key=worst)[-5:]
    names = []
    for number in numbers:
        request = optimist.request(prompt(number), params(number))
        engine.add_request(request, stream=True)
        names.append(request.request_id)
    said: dict[str, list[Any]] = {name: [] for name in names}
    ended: dict[str, RequestOutput] = {}
    oldest = []
    while engine.busy:
        if engine._scheduler.groups:
            oldest.append(int(engine._scheduler.groups[0].request.request_id))
        ended |= {output.request_id: output for output in engine.step()}
        safe(engine)
        for name in names:
            said[name] += engine.chunks(name)
    assert oldest == sorted(oldest)  # the first to come is never preempted
    for name, number in zip(names, numbers, strict=True):
        assert fingerprint(ended[name]) == alone[number]
        assert [token for chunk in said[name] for token in chunk.token_ids] == alone[number][0]
        assert "".join(chunk.text for chunk in said[name]) == ended[name].outputs[0].text
        assert [chunk.finished for chunk in said[name]] == [False] * (len(said[name]) - 1) + [True]
        times = ended[name].metrics
        assert 0 < times.first_token_seconds <= times.seconds
        engine.forget(name)
    preemptions = sum(ended[name].metrics.preemptions for name in names)
    assert preemptions == optimist.metrics()["preemptions"] - before["preemptions"] > 0
    assert any(ended[name].metrics.preemptions and len(said[name]) > 1 and said[name][0].token_ids for name in names)


def test_aborted_while_it_waits_to_come_back(optimist: LLM) -> None:
    """Its output is what its reader has got so far."""
    engine = lend(optimist, WORST).engine
    found = 0
    for number in (2, 4, 6, 8):
        names = []
        for which in (number, (number + 4) % COUNT, (number + 6) % COUNT):
            request = optimist.request(prompt(which), params(which))
            engine.add_request(request, stream=True)
            names.append(request.request_id)
        gone = None
        outputs: dict[str, RequestOutput] = {}
        while engine.busy:
            outputs |= {output.request_id: output for output in engine.step()}
            if gone is None and engine._preempted:
                gone = next(iter(engine._preempted))
                engine.abort(gone)
                safe(engine)
        for name in names:
            chunks = engine.chunks(name)
            assert "".join(chunk.text for chunk in chunks) == outputs[name].outputs[0].text
            assert [token for chunk in chunks for token in chunk.token_ids] == outputs[name].outputs[0].token_ids
            engine.forget(name)
        if gone is not None:
            found += 1
            assert outputs[gone].outputs[0].finish_reason == "abort"
            assert outputs[gone].metrics.preemptions == 1
    assert found > 1
    assert engine.runner.free_pages() == WORST


def test_by_the_worst_case_nobody_is_preempted(pair: Pair, alone: list[tuple[Any, ...]]) -> None:
    with smc_llm(pair) as cautious:
        cautious.engine.runner.chunks = cautious.engine._scheduler.chunks = ChunkLengths(8, 8)
        lend(cautious, WORST * 3 // 2)
        for number in range(COUNT):
            cautious.engine.add_request(cautious.request(prompt(number), params(number)))
        outputs: list[RequestOutput] = []
        while cautious.engine.busy:
            outputs += cautious.engine.step()
            safe(cautious.engine)
        outputs.sort(key=lambda output: int(output.request_id))
        assert [fingerprint(output) for output in outputs] == alone
        assert cautious.metrics()["preemptions"] == 0


# The bounds.


def test_what_a_first_cycle_needs_is_what_it_takes(optimist: LLM) -> None:
    """Rows that share everything and diverge: the bound is attained, so it is not to be had lower."""
    engine, footprint = optimist.engine, Footprint(ROWS, PAGE_SIZE, WIDTH)
    for length in (4, 6, 7, 9):
        lend(optimist, PAGES)
        params = SamplingParams(seed=4, ignore_eos=True)
        request = optimist.request({"prompt_token_ids": [97] * length}, params)
        engine.add_request(request)
        while not any(group.started for group in engine._scheduler.groups):
            engine.step()
        taken = PAGES - int(engine.runner.state.memory.pool.num_free)
        assert engine.runner.state.log_weight.any(), "nothing was resampled, so no row has lost its pages"
        assert taken - footprint.prompt(length) == footprint.need(length, request.limit, 0)
        assert footprint.ceiling(length, request.limit, 1) >= taken
        engine.abort(request.request_id)
        engine.step()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.integers(1, 17), st.integers(1, 9))
def test_bounds_add_up_to_the_worst_case(length: int, new: int, rows: int, page_size: int, width: int) -> None:
    footprint, limit = Footprint(rows, page_size, width), length + new
    ceilings = [footprint.ceiling(length, limit, cycles) for cycles in range(new + 2)]
    assert ceilings == sorted(ceilings)
    assert ceilings[-1] == footprint.worst_case(length, limit)
    for cycles in range(1, new + 1):
        # Rows that share nothing but full pages of the prompt need no copies: the rest of the bound is for those.
        grown = ceilings[cycles + 1] - ceilings[cycles]
        needed = footprint.need(length, limit, cycles)
        first = length + cycles * width
        assert needed == 0 or grown <= needed <= grown + (rows - 1) + rows * (min(first + width, limit) == limit)


# The scheduler against a device that does what it likes within what a device can do.


class Device:
    """Pages of each running group, moved at random within what the allocator can do; counts are reported late."""

    def __init__(self, pages: int, footprint: Footprint, rng: random.Random, greed: float) -> None:
        self.free, self.footprint, self.rng, self.greed = pages, footprint, rng, greed
        self.held: dict[str, int] = {}

    def join(self, request: Request) -> None:
        self.held[request.request_id] = self.footprint.prompt(len(request.token_ids))
        self.free -= self.held[request.request_id]
        assert self.free >= 0

    def cycle(self, request: Request, cycles: int) -> None:
        """All rows take first, and then some pages come back by resampling."""
        name, length = request.request_id, len(request.token_ids)
        first, last = (length + (cycles + i) * WIDTH for i in range(2))
        most = self.footprint.ceiling(length, request.limit, cycles + 1) - self.held[name]
        entered = (min(last, request.limit) - 1) // PAGE_SIZE - (first // PAGE_SIZE)
        takes = ROWS * entered + ROWS - (first % PAGE_SIZE > 0) if first < request.limit - 1 else 0
        takes = min(takes, most) if self.rng.random() < self.greed else self.rng.randint(0, max(0, min(takes, most)))
        self.held[name] += takes
        self.free -= takes
        assert self.free >= 0, "an allocation failed"

    def resample(self, name: str, request: Request) -> None:
        least = self.footprint.prompt(len(request.token_ids))
        back = self.rng.randint(0, self.held[name] - least) if self.rng.random() > self.greed else 0
        self.held[name] -= back
        self.free += back

    def leave(self, name: str) -> None:
        self.free += self.held.pop(name)


@given(st.data(), st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.integers(1, 17), st.integers(1, 9))
def test_rows_that_agree_between_cycles(
    data: st.DataObject, length: int, new: int, rows: int, page_size: int, width: int
) -> None:
    """A group that gains 1 to W tokens a cycle, in which every row has pages of its own for what it writes."""
    footprint, limit = Footprint(rows, page_size, width, ragged=True, agrees=True), length + new
    assert footprint.worst_case(length, limit) <= Footprint(rows, page_size, width).worst_case(length, limit)
    reached, most = length, 0
    for cycles in range(new):
        named = -(-reached // page_size)
        first, last = reached // page_size, (min(reached + width, limit) - 1) // page_size
        taken = rows * (last - first + 1) - (reached % page_size > 0)  # somebody keeps the part-filled page
        assert taken <= footprint.need(length, limit, cycles) or reached >= limit - 1
        assert named + taken <= footprint.ceiling(length, limit, cycles + 1) <= footprint.worst_case(length, limit)
        most = max(most, named + taken)
        reached = min(reached + data.draw(st.integers(1, width)), limit)
        if reached == limit:
            break
    if width == 1 and page_size == 1:
        assert most >= footprint.worst_case(length, limit) - rows  # so it is not to be had much lower


def play(seed: int, pages: int, lag: int, greed: float) -> int:
    """Twelve requests to their ends; returns how often one was preempted."""
    rng, footprint = random.Random(seed), Footprint(ROWS, PAGE_SIZE, WIDTH)
    scheduler = Scheduler(
        [1, 2, 4, 8], pages, ChunkLengths(8, 16), PrefixCache(0, PAGE_SIZE), footprint, optimistic=True
    )
    scheduler.free.utilization = rng.random()
    device = Device(pages, footprint, rng, greed)
    cycles: dict[str, int] = {}
    arriving = []
    for number in range(12):
        length, new = rng.randint(1, 19), rng.randint(1, 26)
        most = Footprint(ROWS, PAGE_SIZE, WIDTH).worst_case(length, length + new)
        arriving.append(Request(str(number), None, [1] * length, SamplingParams(), length + new, (), 0, most))
    reports: list[tuple[int, Any, int]] = []
    preempted = 0
    for step in range(5000):
        while arriving and rng.random() < 0.5:
            scheduler.add(arriving.pop(0))
        schedule = scheduler.schedule()
        for group in schedule.preempted:
            preempted += 1
            assert group is not min([*scheduler.groups, group], key=lambda group: int(group.request.request_id)), (
                "the oldest was preempted"
            )
            device.leave(group.request.request_id)
            del cycles[group.request.request_id]
            reports.append((step, scheduler.mark(), device.free))
        for group in schedule.joining:
            device.join(group.request)
            cycles[group.request.request_id] = 0
        if schedule.cycle:
            started = [group.request for group in scheduler.groups if group.started]
            for request in started:
                device.cycle(request, cycles[request.request_id])
                cycles[request.request_id] += 1
            for request in started:
                device.resample(request.request_id, request)
            reports.append((step, scheduler.mark(), device.free))
        for request in [group.request for group in scheduler.groups if group.started]:
            at_cap = len(request.token_ids) + cycles[request.request_id] * WIDTH >= request.limit - 1
            if at_cap or rng.random() < 0.05:
                scheduler.withdraw(request.request_id)
                device.leave(request.request_id)
                del cycles[request.request_id]
                reports.append((step, scheduler.mark(), device.free))
        while reports and (schedule.idle or reports[0][0] <= step - lag):
            _, mark, free = reports.pop(0)
            scheduler.free.report(mark, free)
        assert device.free >= scheduler.free.at_least
        if not arriving and not scheduler:
            assert device.free == pages
            return preempted
    raise AssertionError("it does not end")


LARGEST = Footprint(ROWS, PAGE_SIZE, WIDTH).worst_case(1, 45)


@settings(max_examples=150)
@given(st.integers(0, 10**9), st.integers(0, 2 * LARGEST), st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0]))
def test_whatever_the_device_does(seed: int, more: int, lag: int, greed: float) -> None:
    play(seed, LARGEST + more, lag, greed)


def test_that_play_is_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: preemptions do happen in it, and a bound that is a page short fails."""
    assert sum(play(seed, LARGEST + 9, 1, 1.0) for seed in range(20)) > 10
    need = Footprint.need
    monkeypatch.setattr(Footprint, "need", lambda self, *request, **how: need(self, *request, **how) - 1)
    monkeypatch.setattr(Scheduler, "_ceiling", lambda self, group, cycles: PAGES if cycles else 1)
    failed = 0
    for seed in range(100):
        try:
            play(seed, LARGEST, 0, 1.0)
        except AssertionError as error:
            failed += "an allocation failed" in str(error)
    assert failed > 0
