"""The engine under asyncio: many readers at once, each as if alone; who leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from smcjax import LLM, SMC, AsyncLLM, Autoregressive, RequestOutput, SamplingParams, StreamChunk
from smcjax.engine import async_llm
from smcjax.engine.engine import Engine
from smcjax.errors import QueueFull, RequestsLost
from tests.checkpoints import Pair
from tests.engine.conftest import MAX_MODEL_LEN


def make(pair: Pair, max_waiting: int | None = None) -> AsyncLLM:
    decoding = SMC(n_particles=4, gamma=3, trace=True)
    return AsyncLLM(
        pair.target,
        draft_model=pair.draft,
        decoding=decoding,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        page_size=4,
        max_waiting=max_waiting,
    )


def params(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=3 + 4 * seed, ignore_eos=True)


async def read(llm: AsyncLLM, seed: int, delay: float = 0.0) -> RequestOutput:
    await asyncio.sleep(delay)
    chunks = [chunk async for chunk in llm.generate("ab", params(seed))]
    output = chunks[-1].output
    assert output is not None
    assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
    assert [token for chunk in chunks for token in chunk.token_ids] == output.outputs[0].token_ids
    return output


def test_many_readers_and_one_that_leaves(pair: Pair, llm: LLM) -> None:
    async def session() -> list[RequestOutput]:
        async with make(pair) as served:
            leaver = served.generate("cd", SamplingParams(seed=1, max_tokens=40, ignore_eos=True))
            await anext(leaver)
            readers = [asyncio.create_task(read(served, seed, 0.003 * seed)) for seed in range(7)]
            await leaver.aclose()
            cancelled = asyncio.create_task(read(served, 9))
            await asyncio.sleep(0.005)
            cancelled.cancel()
            outputs = await asyncio.gather(*readers)
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            metrics = await served.metrics()
            assert metrics["num_running"] == metrics["num_waiting"] == 0
            assert metrics["kv_pages_free"] == metrics["kv_pages_total"]
            return outputs

    for seed, output in enumerate(asyncio.run(session())):
        assert output.outputs == llm.generate("ab", params(seed), use_tqdm=False)[0].outputs


def test_a_request_waits_from_the_moment_that_it_comes(pair: Pair) -> None:
    """Also while a step is in progress, or another thread has the engine."""

    async def session() -> tuple[RequestOutput, float]:
        async with make(pair) as served:
            await read(served, 1)  # compiled from here on
            with served.llm.turn:
                reader = asyncio.create_task(read(served, 2))
                await asyncio.sleep(0.05)  # and it has come
                since = time.perf_counter()
                await asyncio.sleep(0.25)
                held = time.perf_counter() - since
            return await reader, held

    output, held = asyncio.run(session())
    assert output.metrics.queue_seconds >= held


def test_errors_reach_their_readers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
        async with make(pair) as served:
            with pytest.raises(ValueError, match="the prompt is empty"):
                served.generate("")
            for prompt in (5, None, ["a", "b"], [[1, 2]]):
                with pytest.raises(ValueError, match="prompt must be text or"):
                    served.generate(prompt)
            before = await read(served, 2)
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "_collect", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
                results = await asyncio.gather(*(read(served, seed) for seed in range(3)), return_exceptions=True)
            assert [str(result) for result in results] == ["broken"] * 3
            assert len(set(map(id, results))) == 3
            assert (await read(served, 2)).outputs == before.outputs

    asyncio.run(session())


def test_an_error_in_another_threads_step_reaches_the_readers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes the step that fails ends everything in flight, and nobody may wait for ever for what was in it."""
    original = Engine._collect

    def fail_beside(engine: Engine, last: int) -> list[RequestOutput]:
        if threading.current_thread().name != "beside":
            time.sleep(0.02)  # so that the reader is still there
            return original(engine, last)
        monkeypatch.setattr(Engine, "_collect", original)
        raise RuntimeError("broken")

    async def session() -> None:
        async with make(pair) as served:
            before = await read(served, 2)

            def beside() -> None:
                with served.llm.turn, pytest.raises(RuntimeError, match="broken"):
                    served.llm.advance(served.llm.engine)

            reader = asyncio.create_task(read(served, 15))
            monkeypatch.setattr(Engine, "_collect", fail_beside)
            while not served.llm.engine._running:
                await asyncio.sleep(0.001)
            thread = threading.Thread(target=beside, name="beside")
            thread.start()
            (result,) = await asyncio.wait_for(asyncio.gather(reader, return_exceptions=True), 60)
            await asyncio.to_thread(thread.join)
            assert isinstance(result, RuntimeError)
            assert "is gone: an error elsewhere" in str(result)
            assert (await read(served, 2)).outputs == before.outputs

    asyncio.run(session())


def test_a_closed_llm_tells_new_readers(pair: Pair) -> None:
    async def session() -> None:
        served = make(pair)
        served.llm.close()
        with pytest.raises(ValueError, match="this LLM is closed"):
            await asyncio.wait_for(read(served, 1), 60)
        await served.close()

    asyncio.run(session())


def test_closing_tells_every_reader(pair: Pair) -> None:
    """Also those that wait when another's last chunk leads to it; then the device memory is free."""

    async def session() -> None:
        served = make(pair)
        longs = [asyncio.create_task(read(served, 9, 0.001 * i)) for i in range(3)]
        await read(served, 0)
        await served.close()
        for result in await asyncio.wait_for(asyncio.gather(*longs, return_exceptions=True), 60):
            assert isinstance(result, RuntimeError)
            assert "closed" in str(result)
        assert served.llm._engine is None
        with pytest.raises(ValueError, match="this LLM is closed"):
            await served.metrics()
        with pytest.raises(RuntimeError, match="closed"):
            await read(served, 1)
        await served.close()  # again: nothing

    asyncio.run(session())


def test_who_is_cancelled_twice_leaves_nothing_behind(pair: Pair) -> None:
    async def session() -> None:
        async with make(pair) as served:
            for _ in range(3):
                reader = asyncio.create_task(read(served, 9))
                await asyncio.sleep(0.05)
                reader.cancel()
                await asyncio.sleep(0)
                reader.cancel()
                await asyncio.wait([reader])
            metrics = await served.metrics()
            assert metrics["num_running"] == metrics["num_waiting"] == 0
            assert served.llm.engine._streams == {}

    asyncio.run(session())


def test_nothing_turns_while_a_reader_pauses(pair: Pair) -> None:
    """A reader that has its last chunk and keeps the generator costs no steps; a thread may use the LLM meanwhile."""

    async def session() -> None:
        async with make(pair) as served:
            stream = served.generate("ab", params(1))
            async for chunk in stream:
                if chunk.finished:
                    break
            before = (await served.metrics())["steps"]
            await asyncio.sleep(0.2)
            assert (await served.metrics())["steps"] <= before + 3
            beside = asyncio.to_thread(served.llm.generate, ["ab", "cd"], params(2), use_tqdm=False)
            outputs, read_here = await asyncio.gather(beside, read(served, 2))
            assert outputs[0].outputs == read_here.outputs

    asyncio.run(session())


def assert_all_free(served: AsyncLLM) -> None:
    """Nothing is in flight any more, soon."""
    for _ in range(200):
        metrics = asyncio.run(served.metrics())
        if not metrics["num_running"] + metrics["num_waiting"] and served._thread is None:
            break
        time.sleep(0.02)
    assert metrics["num_running"] == metrics["num_waiting"] == 0
    assert metrics["kv_pages_free"] == metrics["kv_pages_total"]
    assert served._inboxes == {}
    assert served.llm.engine._streams == {}


def test_event_loops_one_after_the_other(pair: Pair, llm: LLM) -> None:
    expected = [llm.generate("ab", params(seed), use_tqdm=False)[0].outputs for seed in range(3)]
    held = {id(array) for array in jax.live_arrays()}
    served = make(pair)
    assert [asyncio.run(read(served, seed)).outputs for seed in range(3)] == expected
    asyncio.run(served.close())
    asyncio.run(served.close())
    assert served._thread is None
    assert [array.shape for array in jax.live_arrays() if id(array) not in held and array.nbytes > 64] == []
    with pytest.raises(RuntimeError, match="this AsyncLLM is closed"):
        asyncio.run(read(served, 1))


def test_a_loop_that_ends_with_requests_in_flight(pair: Pair) -> None:
    """They go with it, and another loop closes what it has left."""
    held = {id(array) for array in jax.live_arrays()}
    served, left = make(pair), []

    async def begin() -> None:
        left.append(served.generate("ab", SamplingParams(seed=1, max_tokens=40, ignore_eos=True)))
        await anext(left[-1])

    asyncio.run(begin())
    assert_all_free(served)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()  # without a word to its iterators
    asyncio.run(served.close())
    assert [array.shape for array in jax.live_arrays() if id(array) not in held and array.nbytes > 64] == []


def test_two_event_loops_at_once(pair: Pair, llm: LLM) -> None:
    served, outputs = make(pair), {}

    async def some(seeds: list[int]) -> None:
        outputs.update(zip(seeds, await asyncio.gather(*(read(served, seed) for seed in seeds)), strict=True))

    threads = [threading.Thread(target=lambda seeds=seeds: asyncio.run(some(seeds))) for seeds in ([0, 1, 2], [3, 4])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for seed in range(5):
        assert outputs[seed].outputs == llm.generate("ab", params(seed), use_tqdm=False)[0].outputs
    assert_all_free(served)
    asyncio.run(served.close())


def test_news_wake_each_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readers in one loop, one in another, and one whose loop is closed, which is given up."""
    loops = [asyncio.new_event_loop() for _ in range(3)]
    woken: list[asyncio.AbstractEventLoop] = []
    for loop in loops:
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *of, of_loop=loop, wake=wake: (woken.append(of_loop), wake(*of))
        )

    async def inbox(name: str) -> Any:
        return async_llm._Inbox(cast(Any, SimpleNamespace(request_id=name)))

    inboxes = [loops[at].run_until_complete(inbox(name)) for name, at in zip("abcd", (0, 1, 0, 2), strict=True)]
    loops[2].close()
    given_up: list[str] = []
    news: Any = [(one, [one.request.request_id]) for one in inboxes]
    served: Any = SimpleNamespace(llm=SimpleNamespace(give_up=given_up.extend), _news=news)
    AsyncLLM._hand_out(served)
    AsyncLLM._hand_out(served)  # what has been handed out is gone
    assert woken == loops
    assert given_up == ["d"]
    assert [one.loop.run_until_complete(one.get()) for one in inboxes[:3]] == [["a"], ["b"], ["c"]]
    for loop in loops:
        loop.close()


class Noted:
    """Writes calls of methods down, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened: list[str] = []
        self._patch = monkeypatch

    def calls(self, owner: Any, name: str, event: str, counts: Callable[[Any], bool] = lambda _: True) -> None:
        """Calls of this method are `event`s from now on, where `counts` says so of the first argument."""
        method = getattr(owner, name)

        def call(*args: Any) -> Any:
            if counts(args[0]):
                self.happened.append(event)
            return method(*args)

        self._patch.setattr(owner, name, call)


def test_readers_are_woken_while_the_device_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are handed out when the next cycle is enqueued, and before anybody waits for that."""
    noted = Noted(monkeypatch)
    happened = noted.happened
    monkeypatch.setattr(async_llm, "LLM", lambda: llm)
    noted.calls(llm.engine.runner, "step", "enqueue")
    noted.calls(llm.engine, "_collect", "wait")
    noted.calls(AsyncLLM, "_hand_out", "hand out", lambda served: bool(served._news))
    served = AsyncLLM()
    output = asyncio.run(read(served, seed=8))
    asyncio.run(served.drain())
    *early, last = [at for at, event in enumerate(happened) if event == "hand out"]
    assert len(early) >= output.metrics.cycles / 2, "one a cycle that brings anything"
    assert {(happened[at - 1], happened[at + 1]) for at in early} == {("enqueue", "wait")}
    assert happened[last - 1] == "wait", "the end is not kept until there is something else to do"


@pytest.mark.parametrize("overlap", [False, True])
def test_an_end_is_handed_out_at_once(llm: LLM, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another request goes on, behind whose next cycle all other chunks are handed out."""
    noted = Noted(monkeypatch)
    monkeypatch.setattr(async_llm, "LLM", lambda: llm)
    monkeypatch.setattr(llm.engine, "_lag", int(overlap))
    noted.calls(llm.engine.runner, "step", "enqueue")
    noted.calls(AsyncLLM, "_hand_out", "hand out", lambda served: bool(served._news))
    chunks_of = llm.engine.chunks

    def chunks(name: str) -> list[StreamChunk]:
        found = chunks_of(name)
        if found and found[-1].finished:
            noted.happened.append("an end")
        return found

    monkeypatch.setattr(llm.engine, "chunks", chunks)
    served = AsyncLLM()

    async def session() -> None:
        with served.llm.turn:  # so that both begin together
            reading = [asyncio.create_task(read(served, seed)) for seed in (1, 9)]
            await all_come(served, 2)
        await asyncio.gather(*reading)
        await served.drain()

    asyncio.run(session())
    ended = noted.happened.index("an end")
    after = noted.happened[ended + 1 :]
    assert after[0] == "hand out"
    assert after.count("enqueue") > 3, "the other one goes on"


def test_nothing_is_kept_while_programs_are_compiled(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for a lane comes, with programs of its own, while chunks of another are to be handed out."""
    served = AsyncLLM(pair.target, decoding=Autoregressive(), max_model_len=MAX_MODEL_LEN, max_num_seqs=2, page_size=4)
    engine = served.llm.engine
    monkeypatch.setattr(engine, "_lag", 1)
    compile_programs, hand_out = engine.runner.programs.compile, AsyncLLM._hand_out
    kept, handed = [], [0]  # chunks: those that wait while programs are compiled, and all that were handed out before
    total = 0

    def compiling(what: str, jobs: Any, *others: Any) -> None:
        if jobs:
            kept.append(len(served._news))
            handed.append(total)
        compile_programs(what, jobs, *others)

    def handing(of: AsyncLLM) -> None:
        nonlocal total
        total += len(of._news)
        hand_out(of)

    monkeypatch.setattr(engine.runner.programs, "compile", compiling)
    monkeypatch.setattr(AsyncLLM, "_hand_out", handing)

    async def session() -> None:
        async with served:
            with served.llm.turn:
                reading = [asyncio.create_task(read(served, seed)) for seed in (9, 1)]
                await all_come(served, 2)
                waiting = served.generate("ab", SamplingParams(seed=1, max_tokens=3, top_k=3))
                waiting.start()
            assert [chunk async for chunk in waiting][-1].finished
            await asyncio.gather(*reading)

    asyncio.run(session())
    assert len(kept) > 1
    assert set(kept) == {0}
    assert max(handed) > 0, "chunks came before the last compilation"


class Uncopyable(Exception):
    """Made of two things, of which it keeps one message."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(1), MemoryError(), GeneratorExit(), Uncopyable("a", "b")]
)
def test_whatever_ends_a_step_ends_every_reader(
    pair: Pair, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def session() -> None:
        async with make(pair) as served:
            before = await read(served, 2)
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "_collect", lambda *_: (_ for _ in ()).throw(error))
                reading = [asyncio.create_task(read(served, seed)) for seed in range(3)]
                results = await asyncio.wait_for(asyncio.gather(*reading, return_exceptions=True), 60)
            told = type(error) if isinstance(error, MemoryError) else RequestsLost
            assert [type(result) for result in results] == [told] * 3
            assert (await read(served, 2)).outputs == before.outputs

    asyncio.run(session())


def test_iterators_that_nobody_reads_to_their_end(pair: Pair) -> None:
    """Never begun, let go of after a chunk, closed while somebody waits for a chunk."""

    async def session() -> None:
        long = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
        never = served.generate("ab", long)
        begun = served.generate("ab", long)
        await anext(begun)
        del begun, never
        gc.collect()
        await read(served, 1)
        stream = served.generate("ab", long)

        async def rest() -> list[object]:
            return [chunk async for chunk in stream]

        waiting = [asyncio.create_task(rest()) for _ in range(3)]
        await asyncio.sleep(0)
        await stream.aclose()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [[], [], []]

    served = make(pair)
    asyncio.run(session())
    assert_all_free(served)
    asyncio.run(served.close())


def test_a_cancelled_close_still_closes(pair: Pair) -> None:
    async def session() -> None:
        served = make(pair)
        reader = asyncio.create_task(read(served, 9))
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(served.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(RuntimeError, match="closed"):
            await asyncio.wait_for(reader, 60)
        await served.close()
        assert served.llm._engine is None

    asyncio.run(session())


def test_others_get_their_turn_while_it_serves(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants the engine during a step has it before the next step, though the thread that steps wants it too."""
    happened: list[str] = []
    collect, asked = Engine._collect, threading.Event()

    def waited_for(engine: Engine, last: int) -> list[RequestOutput]:
        happened.append("step")
        if len(happened) == 3:
            asked.set()
            while not served.llm.turn.wanted:
                time.sleep(0)
        return collect(engine, last)

    async def session() -> None:
        async with served:
            reader = asyncio.create_task(read(served, 9))
            await asyncio.to_thread(asked.wait, 60)
            await served.metrics()
            await reader

    served = make(pair)
    metrics = served.llm.metrics
    monkeypatch.setattr(served.llm, "metrics", lambda: (happened.append("metrics"), metrics())[1])
    monkeypatch.setattr(Engine, "_collect", waited_for)
    asyncio.run(session())
    assert happened[:5] == ["step", "step", "step", "metrics", "step"]


@pytest.mark.slow
def test_a_process_ends_while_requests_are_in_flight(pair: Pair) -> None:
    """Without a crash, and without a wait for their ends."""
    script = f"""
import asyncio
from smcjax import SMC, AsyncLLM, SamplingParams
served = AsyncLLM({pair.target!r}, draft_model={pair.draft!r}, decoding=SMC(4, 3), max_model_len=1024, page_size=4)
left = []
async def begin():
    left.append(served.generate("ab", SamplingParams(max_tokens=1000, ignore_eos=True)))
    reading = asyncio.ensure_future(anext(left[0]))
    while not served.llm.engine._running:
        await asyncio.sleep(0.01)
loop = asyncio.new_event_loop()
loop.run_until_complete(begin())
print("done")
"""
    quickly = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as programs of this process
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=quickly)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    assert "Fatal" not in ended.stderr


LONG = SamplingParams(seed=9, max_tokens=40, ignore_eos=True)


def test_names_abort_and_leave_the_others(pair: Pair) -> None:
    """While it runs, waits, or has not been read at all; the name is free again afterwards."""

    async def rest(stream: AsyncIterator[StreamChunk]) -> StreamChunk:
        return [chunk async for chunk in stream][-1]

    async def session() -> None:
        async with make(pair) as served:
            whole = await read(served, 9)
            running = served.generate("ab", dataclasses.replace(params(9), logprobs=0), request_id="mine")
            begun = await anext(running)
            beside = asyncio.create_task(read(served, 9))
            assert served.abort("mine")
            last = await rest(running)
            assert last.output is not None
            assert (last.output.request_id, last.output.outputs[0].finish_reason) == ("mine", "abort")
            said = last.output.outputs[0].token_ids
            assert begun.token_ids == said[: len(begun.token_ids)]
            assert said == whole.outputs[0].token_ids[: len(said)]
            assert len(said) < len(whole.outputs[0].token_ids)
            assert (await beside).outputs == whole.outputs
            assert not served.abort("mine")
            never_read = served.generate("ab", LONG, request_id="mine")
            assert served.abort("mine")
            output = (await rest(never_read)).output
            assert output is not None
            assert output.outputs[0].finish_reason == "abort"
            again = served.generate("ab", params(1), request_id="mine")
            assert (await rest(again)).output.outputs == (await read(served, 1)).outputs
            assert served._named == {}
            assert served._unwanted == set()

    asyncio.run(session())


def test_a_name_is_for_one_request_at_a_time(pair: Pair) -> None:
    async def session() -> None:
        async with make(pair) as served:
            stream = served.generate("ab", LONG, request_id="x")
            with pytest.raises(ValueError, match="request_id is 'x', which a request in flight has; choose another"):
                served.generate("ab", LONG, request_id="x")
            assert (await anext(stream)).token_ids, "who is refused has not taken the name away"
            assert served.abort("x")
            for wrong in ("", 5):
                with pytest.raises(ValueError, match="request_id must be some text, or None"):
                    served.generate("ab", LONG, request_id=wrong)
            assert not served.abort("y")
            del stream
            gc.collect()
            assert served._named == {}

    asyncio.run(session())


async def all_come(served: AsyncLLM, count: int) -> None:
    """Waits until so many requests are in flight."""
    while len(served._arriving) + len(served._inboxes) < count:
        await asyncio.sleep(0)


def test_a_full_queue_refuses_and_takes_again(pair: Pair) -> None:
    """Four run and one waits; what is made before and comes later is refused as well."""

    async def session() -> None:
        async with make(pair, max_waiting=1) as served:
            late = served.generate("ab", params(2))
            reading = [asyncio.create_task(read(served, 9)) for _ in range(5)]
            await all_come(served, 5)
            with pytest.raises(QueueFull, match="1 requests may wait and as many do; ask again later"):
                served.generate("ab", params(2))
            with pytest.raises(QueueFull):
                await anext(late)
            outputs = await asyncio.gather(*reading)
            assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
            assert (await read(served, 1)).outputs[0].token_ids
        with pytest.raises(ValueError, match="max_waiting"):
            make(pair, max_waiting=-1)

    asyncio.run(session())


def test_draining_answers_what_has_come(pair: Pair) -> None:
    async def session() -> None:
        async with make(pair) as served:
            whole = await read(served, 9)
            reading = [asyncio.create_task(read(served, 9)) for _ in range(6)]
            await all_come(served, 6)
            draining = asyncio.create_task(served.drain())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="is draining"):
                served.generate("ab", params(1))
            assert not draining.done()
            assert [one.outputs for one in await asyncio.gather(*reading)] == [whole.outputs] * 6
            await asyncio.wait_for(draining, 10)
            metrics = await served.metrics()
            assert metrics["kv_pages_free"] == metrics["kv_pages_total"]

    asyncio.run(session())


def test_chat_is_generate_behind_the_template(pair: Pair) -> None:
    messages = [{"role": "user", "content": "ab"}]

    async def session() -> None:
        async with make(pair) as served:
            assert served.llm.tokenizer is not None
            served.llm.tokenizer._inner.chat_template = "{{ messages[0]['content'] }}{{ 'cd' }}"
            said = [chunk async for chunk in served.chat(messages, params(2), request_id="c")][-1].output
            ids = served.llm.tokenizer._inner("abcd", add_special_tokens=False)["input_ids"]
            plain = [chunk async for chunk in served.generate({"prompt_token_ids": ids}, params(2))][-1].output
            assert said is not None
            assert plain is not None
            assert (said.outputs, said.prompt_token_ids) == (plain.outputs, ids)
            with pytest.raises(ValueError, match="messages"):
                served.chat([], params(2))

    asyncio.run(session())
