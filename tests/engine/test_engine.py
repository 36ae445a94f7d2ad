"""Requests that come and go: each as if it were alone, and nothing of any is left behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from smcjax import LLM, RequestOutput, SamplingParams
from smcjax.engine.engine import Engine
from smcjax.engine.schedule.scheduler import ChunkLengths
from tests.checkpoints import Pair
from tests.engine.conftest import held_back, lend, smc_llm
from tests.helpers import assert_pages_sound

pytestmark = pytest.mark.all_sizes

TIGHT = 25  # pages: two of the largest requests


@pytest.fixture(scope="module")
def tight(pair: Pair, llm: LLM) -> Iterator[LLM]:
    """`llm` with memory for two of the largest requests; chunks of prefill as short as two pages."""
    with smc_llm(pair) as tight:
        tight.engine.runner.chunks = tight.engine._scheduler.chunks = ChunkLengths(8, 16)
        yield lend(tight, TIGHT)


def prompt(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {"prompt_token_ids": rng.integers(0, 256, 1 + number * 7 % 19).tolist()}


def params(number: int) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=1 + number * 5 % 11, temperature=0.7 + 0.1 * (number % 4))


def fingerprint(output: RequestOutput) -> tuple[Any, ...]:
    assert output.smc is not None
    particles = tuple(tuple(particle.token_ids) for particle in output.smc.particles)
    return output.outputs[0].token_ids, output.outputs[0].finish_reason, particles


def drain(engine: Engine) -> dict[str, RequestOutput]:
    outputs = []
    while engine.busy:
        outputs += engine.step()
    return {output.request_id: output for output in outputs}


def add(llm: LLM, number: int) -> str:
    request = llm.request(prompt(number), params(number))
    llm.engine.add_request(request)
    return request.request_id


def sound(engine: Engine) -> None:
    """Counts of pages are those of tables and cache slots, slots without a group hold none, and the host knows."""
    state = engine.runner.state
    if state is None:
        return
    table, cached = np.asarray(state.sequences.block_table), np.asarray(engine.runner.cached)
    others = held_back.get(engine, np.zeros(0, np.int32))
    assert_pages_sound(np.concatenate([table.ravel(), cached, others]), state.memory.pool)
    assert np.flatnonzero(cached).tolist() == sorted(engine._scheduler.cache._slots.values())
    taken = {group.slot for group in engine._scheduler.groups}
    by_slot = table.reshape(engine.runner.size, -1)
    assert all(not by_slot[slot].any() for slot in set(range(engine.runner.size)) - taken)


@pytest.fixture(scope="module")
def alone(tight: LLM) -> list[tuple[Any, ...]]:
    return [fingerprint(tight.generate(prompt(i), params(i), use_tqdm=False)[0]) for i in range(12)]


@pytest.mark.slow
def test_in_any_mix_as_alone(tight: LLM, alone: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Added one by one while others run, in memory for two: waiting, in chunks, moved to batches of other sizes."""
    monkeypatch.setattr(tight.engine, "_lag", 1)
    names: dict[str, int] = {}
    outputs: dict[str, RequestOutput] = {}
    for number in itertools.chain(range(12), reversed(range(12))):
        names[add(tight, number)] = number
        outputs |= {output.request_id: output for output in tight.engine.step()}
        sound(tight.engine)
    outputs |= drain(tight.engine)
    assert len(outputs) == 24
    for request_id, number in names.items():
        assert fingerprint(outputs[request_id]) == alone[number]
    assert tight.metrics()["kv_pages_free"] == TIGHT


@pytest.mark.parametrize("lag", [0, 1])
def test_a_cycle_is_enqueued_before_the_last_one_is_read(tight: LLM, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    runner, read = tight.engine.runner, jax.device_get
    enqueue = runner.step
    monkeypatch.setattr(tight.engine, "_lag", lag)
    monkeypatch.setattr(runner, "step", lambda *which: (events.append("cycle"), enqueue(*which))[1])

    def device_get(value: Any) -> Any:
        events.append("read" if hasattr(value, "ran") else "other")
        return read(value)

    monkeypatch.setattr(jax, "device_get", device_get)
    names = [add(tight, number) for number in (10, 3, 6)]  # they end one after the other
    assert set(drain(tight.engine)) == set(names)
    ahead = list(itertools.accumulate({"cycle": 1, "read": -1, "other": 0}[event] for event in events))
    assert max(ahead) == lag + 1
    assert ahead[-1] == 0
    if lag:  # never read dry while there was more to enqueue
        last = max(i for i, event in enumerate(events) if event == "cycle")
        assert min(ahead[events.index("cycle") : last]) == 1


def test_a_compilation_in_flight_is_in_nobodys_times(tight: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ran while half a second went into compiling has neither queued nor run for that time."""
    engine, seconds = tight.engine, 0.5
    first, began = add(tight, 10), time.perf_counter()
    assert engine.step() == []
    compile_nothing = engine.runner.compile
    slow = iter([seconds])
    monkeypatch.setattr(
        engine.runner, "compile", lambda *args: (time.sleep(next(slow, 0.0)), compile_nothing(*args))[1]
    )
    add(tight, 11)
    metrics = drain(engine)[first].metrics
    elapsed = time.perf_counter() - began
    assert 0 < metrics.first_token_seconds <= metrics.seconds <= elapsed - seconds
    assert metrics.queue_seconds + metrics.seconds <= elapsed - seconds


def machine(llm: LLM, alone: list[tuple[Any, ...]]) -> Callable[[], RuleBasedStateMachine]:
    """Random operations on the engine, in any order."""

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.asked: dict[str, int] = {}
            self.ended: dict[str, RequestOutput] = {}

        @rule(number=st.integers(0, len(alone) - 1))
        def add(self, number: int) -> None:
            self.asked[add(llm, number)] = number

        @rule(count=st.integers(1, 3))
        def step(self, count: int) -> None:
            for _ in range(count):
                self.ended |= {output.request_id: output for output in llm.engine.step()}
                sound(llm.engine)

        @rule(which=st.integers(0, 1000))
        def abort(self, which: int) -> None:
            living = sorted(self.asked.keys() - self.ended.keys())
            if living:
                llm.engine.abort(living[which % len(living)])

        @rule(lag=st.integers(0, 2))
        def read_later(self, lag: int) -> None:
            llm.engine._lag = lag

        @invariant()
        def pages(self) -> None:
            sound(llm.engine)

        def teardown(self) -> None:
            self.ended |= drain(llm.engine)
            assert self.ended.keys() == self.asked.keys()
            for request_id, output in self.ended.items():
                assert (
                    output.outputs[0].finish_reason == "abort" or fingerprint(output) == alone[self.asked[request_id]]
                )
            assert llm.metrics()["kv_pages_free"] == TIGHT
            assert not llm.engine._running

    return Machine


def bytes_alive() -> int:
    """Returns the bytes of all arrays on the device."""
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
def test_two_thousand_random_operations(tight: LLM, alone: list[tuple[Any, ...]]) -> None:
    tight.warm_up(use_tqdm=False)
    before, held = tight.metrics()["compilations"], bytes_alive()
    run = settings(max_examples=22, stateful_step_count=100, deadline=None, print_blob=True)
    run_state_machine_as_test(machine(tight, alone), settings=run)
    tight.engine._lag = int(jax.default_backend() != "cpu")
    assert tight.metrics()["compilations"] == before
    assert bytes_alive() - held < 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("arriving", "chunks"), [(1, [1]), (2, [2])])
def test_few_prompts_do_not_take_as_long_as_many(
    llm: LLM, arriving: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program for one slot reads one prompt that arrives at four slots; the program for all slots reads two."""
    engine = llm.engine
    read: list[int] = []
    prefill = engine.runner.prefill
    monkeypatch.setattr(
        engine.runner,
        "prefill",
        lambda program, chunks, *of: (read.append(len(chunks)), prefill(program, chunks, *of))[1],
    )

    def arrive(count: int) -> list[Any]:
        requests = [
            llm.request(prompt(i), SamplingParams(seed=i, max_tokens=20, ignore_eos=True)) for i in range(count)
        ]
        for request in requests:
            engine.add_request(request)
        return requests

    early = arrive(4 - arriving)
    engine.step()
    read.clear()
    late = arrive(arriving)
    engine.step()
    assert engine.runner.size == 4
    assert read == chunks
    outputs = drain(engine)
    for together in (early, late):
        for number, request in enumerate(together):
            params = SamplingParams(seed=number, max_tokens=20, ignore_eos=True)
            alone = llm.generate(prompt(number), params, use_tqdm=False)[0]
            assert fingerprint(outputs[request.request_id]) == fingerprint(alone)
