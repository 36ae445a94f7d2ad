"""An interruption at any line, and one more while the first is being cleaned up, costs nobody a wrong answer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import linecache
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from smcjax import LLM, SamplingParams
from smcjax.engine import engine, llm, reset_on_error
from smcjax.engine.run import programs, ready_programs, runner
from smcjax.engine.schedule import page_budget, prefix_cache, scheduler
from smcjax.errors import RequestsLost
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm

pytestmark = [pytest.mark.all_sizes, pytest.mark.compiled_at_once]

TOOL = 4  # of `sys.monitoring`, one that nobody else takes
PROMPTS = ["the same beginning", "the same beginning of it", "d"]
PARAMS = SamplingParams(seed=4, max_tokens=9, ignore_eos=True)
MODULES = [engine, llm, page_budget, prefix_cache, programs, ready_programs, runner, scheduler]

Line = tuple[str, int]


def codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of all functions and methods that a module defines."""
    todo = [thing for thing in vars(module).values() if getattr(thing, "__module__", None) == module.__name__]
    for thing in todo:
        members = [*vars(thing).values(), thing] if inspect.isclass(thing) else [thing]
        for member in members:
            function = inspect.unwrap(getattr(member, "fget", None) or member)
            if isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__:
                yield function.__code__


@functools.cache
def is_left_out(file: str, number: int) -> bool:
    """True for a line of `with` or `try`."""
    return linecache.getline(file, number).lstrip().startswith(("with ", "try:"))


class Strikes:
    """Raises KeyboardInterrupt at lines of the engine: whenever `when`, which is asked before each line, says so.

    Lines of `with` and `try` are left out: there the lock is held by nobody's handler, and no signal can strike. Nor is
    `when` asked before lines that `wanted` says no to, which costs less: thousands of lines are run for one strike.
    """

    def __init__(self, when: Callable[[Line], bool], wanted: Callable[[Line], bool] = lambda line: True) -> None:
        self.when, self.wanted, self.thread = when, wanted, threading.get_ident()

    def __enter__(self) -> Strikes:
        self.codes = {code for module in MODULES for code in codes(module)}
        self.codes |= {code for code in reset_on_error.reset_on_error.__code__.co_consts if isinstance(code, CodeType)}
        sys.monitoring.use_tool_id(TOOL, "strikes")
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, self._line)
        for code in self.codes:
            sys.monitoring.set_local_events(TOOL, code, sys.monitoring.events.LINE)
        return self

    def __exit__(self, *_: object) -> None:
        for code in self.codes:
            sys.monitoring.set_local_events(TOOL, code, 0)
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, None)
        sys.monitoring.free_tool_id(TOOL)

    def _line(self, code: CodeType, number: int) -> None:
        if threading.get_ident() != self.thread:
            return
        if not self.wanted((code.co_filename, number)) or is_left_out(code.co_filename, number):
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "__del__":  # what is raised there goes nowhere
            frame = frame.f_back if frame.f_code is not use.__code__ else None
        if frame is None and self.when((code.co_filename, number)):
            raise KeyboardInterrupt


def use(llm: LLM) -> list[Any]:
    """All that changes what is in flight: streams, one of them left early, and a batch."""
    stream = llm.generate_stream(PROMPTS[0], PARAMS)
    first = next(stream)
    other = llm.generate_stream(PROMPTS[1], PARAMS)
    next(other)
    other.close()  # type: ignore[attr-defined]
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    chunks = [first, *stream]
    return [output.outputs for output in outputs] + ["".join(chunk.text for chunk in chunks)]


def assert_nothing_held(llm: LLM) -> None:
    """No page, no request and no table entry is anybody's."""
    metrics, engine = llm.metrics(), llm.engine
    assert metrics["kv_pages_free"] == metrics["kv_pages_total"]
    assert metrics["num_running"] == metrics["num_waiting"] == 0
    while engine.busy:  # outputs of what was given up
        engine.step()
    assert not any((engine._arrivals, engine._running, engine._streams, engine._reported, llm._awaited, llm._cancelled))
    taken = np.asarray(engine.runner.state.sequences.block_table)
    assert not taken.any()


class Asked:
    """Asks an LLM after each interruption, which costs nobody an answer and holds nothing for anybody."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.expected, self.since = llm, use(llm), list[object]()

    def after(self, *place: object) -> None:
        """Looks at what is held, and every third time for the answers, which an interruption may also spoil later."""
        self.since.append(place)
        try:
            assert self.llm.metrics()["kv_pages_free"] == self.llm.metrics()["kv_pages_total"]
            if len(self.since) == 3:
                assert use(self.llm) == self.expected
                assert_nothing_held(self.llm)
                self.since.clear()
        except BaseException:
            print("interrupted, since all was well, at", *self.since)
            raise


def few_pages(pair: Pair, **changes: Any) -> LLM:
    return smc_llm(pair, {"trace": False}, admission="optimistic", num_pages=75, max_num_seqs=2, **changes)


@pytest.fixture(scope="module")
def ready(pair: Pair) -> Iterator[LLM]:
    """All its programs compiled, few pages."""
    with few_pages(pair, compile_at_start=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def lines(ready: LLM) -> list[Line]:
    """All lines that `use` comes by, in the order of their first time."""
    seen: Counter[Line] = Counter()

    def note(line: Line) -> bool:
        seen[line] += 1
        return False

    with Strikes(note):
        use(ready)
    return list(seen)


def struck(llm: LLM, first: Line, time: int, second: int | None) -> int:
    """Interrupts `use` when it comes by line `first` for the n-th time, and at the line so many later.

    Returns how many lines were run after the first interruption, those of the clean-up; 0 where `second` is None.
    """
    times, after = 0, -1

    def when(line: Line) -> bool:
        nonlocal times, after
        if after >= 0:
            after += 1
            return after == second
        times += line == first
        if times == time:
            after = 0
        return after == 0

    def wanted(line: Line) -> bool:
        return line == first if after < 0 else second is not None

    with contextlib.suppress(KeyboardInterrupt), Strikes(when, wanted):
        use(llm)
    return after


@pytest.mark.slow
def test_an_interruption_at_any_line(ready: LLM, lines: list[Line]) -> None:
    asked = Asked(ready)
    assert len(lines) > 300
    for line in lines:
        struck(ready, line, 1, None)
        asked.after(line)


@pytest.mark.slow
def test_a_second_one_at_any_line_of_the_clean_up(ready: LLM, lines: list[Line]) -> None:
    """For places of the first where a batch is in flight: everywhere in a step, each with every fifth line after it.

    Clean-ups are much alike, so that the lines that one place leaves out are those that the next four have.
    """
    asked = Asked(ready)
    names = (
        "self.state = self.programs[self.size",
        "self.state, info, free",
        "(self.state, self.cached), first",
        "population, self.state",
        "self.dirty = False",
    )
    places = [line for line in lines if linecache.getline(*line).lstrip().startswith(names)]
    assert len(places) >= 5
    for index, place in enumerate(places):
        second = 1 + index % 5
        while True:
            cleaned = struck(ready, place, 3, second)
            asked.after(place, second)
            if cleaned < second:
                break
            second += 5
        assert second > 20, place


@pytest.mark.slow
def test_an_interrupted_construction_holds_nothing(pair: Pair) -> None:
    """At every third line once the weights are there; even while the traceback, and all that it refers to, is kept."""
    gc.collect()
    held = {id(array) for array in jax.live_arrays()}

    def interrupted_at(place: int) -> list[BaseException]:
        """At so many lines after the first weights are there."""
        count = 0

        def when(_: Line) -> bool:
            nonlocal count
            count += any(id(array) not in held for array in jax.live_arrays())
            return count == place

        with Strikes(when):
            try:
                made = smc_llm(pair)
            except KeyboardInterrupt as error:
                return [error]
        made.close()
        return []

    place = 1
    while caught := interrupted_at(place):
        left = [array.shape for array in jax.live_arrays() if id(array) not in held and array.nbytes > 64]
        assert left == [], (place, traceback.format_exception(caught[0]))
        place += 3
    assert place > 30


@pytest.mark.slow
def test_closing_tells_whoever_waits_for_a_turn(pair: Pair) -> None:
    """Threads that wait while somebody closes the LLM, with requests in flight and with new ones."""
    with few_pages(pair) as llm:
        llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
        stream = llm.generate_stream(PROMPTS[0], PARAMS)
        next(stream)
        uses = [
            lambda: llm.generate(PROMPTS, PARAMS, use_tqdm=False),
            lambda: llm.generate_stream(PROMPTS[0], PARAMS),
            lambda: list(stream),
            llm.metrics,
            llm.warm_up,
        ]
        said: list[str] = []

        def wait(use: Callable[[], object]) -> None:
            try:
                use()
                said.append("nothing")
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=wait, args=(use,)) for use in uses]
        with llm._turn:
            for thread in threads:
                thread.start()
            time.sleep(0.3)  # and they wait
            llm.close()
        for thread in threads:
            thread.join()
    assert said == ["ValueError: this LLM is closed; make a new one."] * len(uses)


@pytest.mark.slow
def test_an_interrupted_close_is_finished_by_the_next(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {id(array) for array in jax.live_arrays()}
    llm = few_pages(pair)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "close", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.close()
    with pytest.raises(ValueError, match="this LLM is closed"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.close()
    assert [array.shape for array in jax.live_arrays() if id(array) not in held and array.nbytes > 64] == []


@pytest.mark.slow
def test_what_one_loses_by_anothers_interruption_is_said(ready: LLM) -> None:
    """A step's outputs are gone if whoever took it is interrupted then; who waits for them waits for nothing else."""
    stream = ready.generate_stream(PROMPTS[0], dataclasses.replace(PARAMS, max_tokens=30))
    request = ready.request("d", dataclasses.replace(PARAMS, max_tokens=2))
    ready.engine.add_request(request)
    while ready.engine.holds(request.request_id):
        ready.engine.step()
    assert ready.engine.busy
    with pytest.raises(RequestsLost, match=f"request {request.request_id} is gone"):
        ready._advance_for(ready.engine, {request.request_id})
    assert list(stream)[-1].finished


def test_an_interruption_while_programs_compile_begins_no_more_of_them() -> None:
    begun: list[int] = []
    release = threading.Event()

    def slow(number: int) -> Callable[[jax.Array], jax.Array]:
        def traced(x: jax.Array) -> jax.Array:
            begun.append(number)
            release.wait(20)
            return x + number

        return traced

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    jobs = {number: programs.Job(slow(number), (), (jax.ShapeDtypeStruct((), "float32"),)) for number in range(1, 60)}
    jobs[0] = programs.Job(lambda x: x, (), (jax.ShapeDtypeStruct((), "float32"),))
    made, before = programs.Programs(), time.perf_counter()
    try:
        with pytest.raises(KeyboardInterrupt):
            made.compile("for a test", {0: jobs.pop(0), **jobs}, interrupt)
        assert time.perf_counter() - before < 15
    finally:
        release.set()
    time.sleep(0.2)
    assert len(made) == 0
    assert len(begun) <= programs.MAX_CONCURRENT_COMPILATIONS
