"""Programs that are compiled beside the engine: who needs them waits, everybody else goes on, tokens stay the same."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from smcjax import LLM, RequestOutput, SamplingParams
from smcjax.engine.async_llm import ChunkStream
from smcjax.engine.run.background import Abandoned, BackgroundCompiler
from smcjax.engine.run.features import MAX_SETS, WORDS, ProgramVariants
from smcjax.engine.run.runner import Runner
from tests.checkpoints import Pair
from tests.engine.conftest import make_async

PLAIN = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)


async def read(stream: ChunkStream) -> RequestOutput:
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].output is not None
    return chunks[-1].output


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    """Tokens are the same; log-probabilities may round otherwise."""
    (answer,), (other,) = output.outputs, expected.outputs
    assert (output.error, answer.token_ids, answer.finish_reason) == (None, other.token_ids, other.finish_reason)
    assert (answer.top_logprobs is None) == (other.top_logprobs is None)
    for one, its in zip(answer.top_logprobs or [], other.top_logprobs or [], strict=True):
        assert {top.token_id: top.logprob for top in one} == pytest.approx({top.token_id: top.logprob for top in its})
    assert (output.prompt_logprobs or [None])[1:] == pytest.approx((expected.prompt_logprobs or [None])[1:])


@pytest.fixture
def alone(llm: LLM) -> Callable[[SamplingParams], RequestOutput]:
    """Answers to "ab", each by an engine that has nothing else to do and compiles what it needs at once."""
    return lambda params: llm.generate("ab", params, use_tqdm=False)[0]


class Held:
    """Compilations of programs with features wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.begun: list[tuple[int, frozenset[str]]] = []
        compile_all = Runner.compile

        def held(runner: Runner, sizes: Any, program: Any, *rest: Any) -> None:
            if program.features:
                self.begun += [(size, program.features) for size in sizes]
                assert self.go.wait(60)
                if error is not None:
                    raise error
            compile_all(runner, sizes, program, *rest)

        monkeypatch.setattr(Runner, "compile", held)


@pytest.mark.slow
def test_plain_requests_go_on_while_programs_for_another_compile(
    pair: Pair, alone: Callable[[SamplingParams], RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)

    async def session() -> None:
        async with make_async(pair) as served:
            await read(served.generate("ab", PLAIN))
            asking = served.generate("ab", dataclasses.replace(PLAIN, logprobs=2))
            running = served.generate("ab", dataclasses.replace(PLAIN, max_tokens=40))
            await anext(running)
            waits = asyncio.create_task(read(asking))
            while not asking.lacks_programs:
                await asyncio.sleep(0.001)
            assert not running.lacks_programs
            for _ in range(3):  # one that runs and three that come later
                output = await asyncio.wait_for(read(served.generate("ab", PLAIN)), 30)
                assert_same(output, alone(PLAIN))
            assert (await asyncio.wait_for(read(running), 30)).outputs
            assert not waits.done()
            metrics = await served.metrics()
            assert (metrics["num_running"], metrics["num_waiting"]) == (0, 1)
            held.go.set()
            output = await waits
            assert held.begun.count((4, frozenset({"logprobs"}))) == 1
            assert_same(output, alone(dataclasses.replace(PLAIN, logprobs=2)))
            assert output.metrics.queue_seconds > 0
            assert not asking.lacks_programs

    asyncio.run(session())


def test_who_waits_for_programs_may_leave(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborted or let go of; and closing the engine waits for no compilation."""
    held = Held(monkeypatch)

    async def session() -> None:
        async with make_async(pair) as served:
            await read(served.generate("ab", PLAIN))
            asking = served.generate("ab", dataclasses.replace(PLAIN, logprobs=2), request_id="x")
            waits = asyncio.create_task(read(asking))
            while not held.begun:
                await asyncio.sleep(0.001)
            assert served.abort("x")
            assert (await waits).outputs[0].finish_reason == "abort"
            left = served.generate("ab", dataclasses.replace(PLAIN, logprobs=2))
            left.start()
            await left.aclose()
            assert (await read(served.generate("ab", PLAIN))).outputs[0].token_ids
            began = time.perf_counter()
        assert time.perf_counter() - began < 5

    try:
        asyncio.run(session())
    finally:
        held.go.set()


def test_programs_that_do_not_fit_end_who_asked_for_them_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, ValueError("it needs more than there is."))
    held.go.set()

    async def session() -> tuple[RequestOutput, RequestOutput]:
        async with make_async(pair) as served:
            running = served.generate("ab", dataclasses.replace(PLAIN, max_tokens=40))
            await anext(running)
            asking = served.generate("ab", dataclasses.replace(PLAIN, logprobs=1))
            return await asyncio.gather(read(running), read(asking))

    answered, refused = asyncio.run(session())
    assert (answered.error, len(answered.outputs[0].token_ids)) == (None, 40)
    assert refused.error == "logprobs cannot be used here: it needs more than there is."


def test_what_breaks_a_compilation_reaches_readers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, TypeError("broken"))
    held.go.set()

    async def session() -> None:
        async with make_async(pair) as served:
            with pytest.raises(TypeError, match="broken"):
                await read(served.generate("ab", dataclasses.replace(PLAIN, logprobs=1)))
            assert (await read(served.generate("ab", PLAIN))).outputs[0].token_ids

    asyncio.run(session())


def test_automata_are_followed_anew_behind_programs_that_know_of_none(pair: Pair) -> None:
    """A form's request whose batch ran, for a while, a program without automata cannot be: its walk begins anew."""
    form = SamplingParams(seed=2, max_tokens=20, response_format={"type": "regex", "regex": "[ab]{12}"})

    async def session() -> None:
        async with make_async(pair) as served:
            for _ in range(2):
                outputs = await asyncio.gather(
                    *(read(served.generate("ab", dataclasses.replace(PLAIN, seed=seed))) for seed in range(2)),
                    read(served.generate("ab", form)),
                )
                text = outputs[-1].outputs[0].text
                assert len(text) == 12
                assert set(text) <= set("ab")

    asyncio.run(session())


def test_a_choice_takes_the_fewest_features_that_suffice() -> None:
    a, ab, none = frozenset({"logprobs"}), frozenset({"logprobs", "adjustments"}), frozenset[str]()
    choice = ProgramVariants()
    assert (choice.sizes(none), choice.at(4, none), choice.missing([4, 1], a)) == ([], None, 4)
    choice.register(4, ab)
    choice.register(1, a, ValueError("too large"))
    assert (choice.sizes(none), choice.sizes(a), choice.at(4, a), choice.at(1, a)) == ([4], [4], ab, None)
    assert (choice.missing([4, 1], a), choice.missing([1], a), choice.missing([4], ab)) == (4, None, None)
    choice.register(4, a)
    choice.register(2, none)
    assert (choice.sizes(none), choice.at(4, none), choice.at(4, ab), choice.at(2, none)) == ([2, 4], a, ab, none)


def test_many_sets_of_features_share_programs() -> None:
    """The first `MAX_SETS` of 64 sets of features have programs of their own; later ones share those of all asked."""
    choice, words = ProgramVariants(), sorted(WORDS)
    for bits in range(64):
        features = frozenset(word for bit, word in enumerate(words) if bits >> bit & 1)
        wanted = choice.shared(features)
        assert wanted >= features
        if choice.missing([4], wanted) is not None:
            choice.register(4, wanted)
        assert (choice.at(4, features) or features) >= features
        assert choice.shared(wanted) == wanted, "it is compiled once"
    assert len(choice._compiled) <= MAX_SETS + len(words)


def test_one_compilation_at_a_time_and_its_end() -> None:
    done: list[Any] = []
    go = threading.Event()

    def compile_programs(sizes: list[int], program: Any, others: set[int], progress: Any) -> None:
        go.wait(20)
        if program == "large":
            raise ValueError("too large")
        if program == "broken":
            raise TypeError("broken")
        done.append((sizes, program, others))
        progress(1, 2)

    runner: Any = types.SimpleNamespace(compile=compile_programs)
    compiler = BackgroundCompiler(runner)
    compiler.wait()
    assert (compiler.busy, compiler.take()) == (False, None)
    compiler.begin(4, "a", {1})
    compiler.wait(0.01)
    assert (compiler.busy, compiler.take()) == (True, None)
    with pytest.raises(AssertionError):
        compiler.begin(2, "c", {1})
    go.set()
    compiler.wait()
    assert (compiler.take(), compiler.take(), compiler.busy) == ((4, "a", None), None, False)
    assert done == [([4], "a", {1})]
    compiler.begin(2, "large", set())
    compiler.wait()
    size, program, error = compiler.take() or (0, None, None)
    assert (size, program, str(error)) == (2, "large", "too large")
    compiler.begin(2, "broken", set())
    compiler.wait()
    with pytest.raises(TypeError, match="broken"):
        compiler.take()
    assert not compiler.busy
    compiler.abandon()
    compiler.begin(2, "c", set())
    compiler.wait()
    with pytest.raises(Abandoned):
        compiler.take()
    assert done[1:] == [([2], "c", set())]


def test_engines_of_a_process_compile_in_turn() -> None:
    """Without collections of all that is alive, which hold all threads; these are as they were afterwards."""
    thresholds, counts, under_way = gc.get_threshold(), list[int](), list[str]()

    def compile_programs(sizes: list[int], program: Any, others: set[int], progress: Any) -> None:
        under_way.append(program)
        time.sleep(0.05)
        counts.append(len(under_way))
        assert gc.get_threshold()[:2] == thresholds[:2]
        assert gc.get_threshold()[2] > 1 << 20
        under_way.remove(program)

    runner: Any = types.SimpleNamespace(compile=compile_programs)
    compilers = [BackgroundCompiler(runner) for _ in range(4)]
    for number, compiler in enumerate(compilers):
        compiler.begin(1, str(number), set())
    for number, compiler in enumerate(compilers):
        compiler.wait()
        assert compiler.take() == (1, str(number), None)
    assert counts == [1] * 4
    assert gc.get_threshold() == thresholds


@pytest.mark.slow
def test_an_async_engine_has_what_it_was_given_at_the_start(pair: Pair) -> None:
    """Nothing is compiled for plain requests behind `compile_at_start`, whatever the sizes."""

    async def session() -> None:
        async with make_async(pair, compile_at_start=True) as served:
            before = (await served.metrics())["compilations"]
            await asyncio.gather(*(read(served.generate("ab", PLAIN)) for _ in range(5)))
            assert (await served.metrics())["compilations"] == before

    asyncio.run(session())
