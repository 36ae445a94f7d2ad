"""The engine under asyncio: many readers at once, each as if alone; who leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
from collections.abc import AsyncIterator

import pytest

from smcjax import LLM, AsyncLLM, RequestOutput, SamplingParams, StreamChunk
from smcjax.engine.engine import Engine
from smcjax.errors import QueueFull
from tests.checkpoints import Pair
from tests.engine.conftest import make_async
from tests.engine.readers import all_come, assert_all_free, params, read


def test_many_readers_and_one_that_leaves(served: AsyncLLM, llm: LLM) -> None:
    async def session() -> list[RequestOutput]:
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


def test_a_request_waits_from_the_moment_that_it_comes(served: AsyncLLM) -> None:
    """Also while a step is in progress, or another thread has the engine."""

    async def session() -> tuple[RequestOutput, float]:
        await read(served, 1)  # compiled from here on
        with served.llm._turn:
            reader = asyncio.create_task(read(served, 2))
            await asyncio.sleep(0.05)  # and it has come
            since = time.perf_counter()
            await asyncio.sleep(0.25)
            held = time.perf_counter() - since
        return await reader, held

    output, held = asyncio.run(session())
    assert output.metrics.queue_seconds >= held


def test_nothing_turns_while_a_reader_pauses(served: AsyncLLM) -> None:
    """A reader that has its last chunk and keeps the generator costs no steps; a thread may use the LLM meanwhile."""

    async def session() -> None:
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


def test_iterators_that_nobody_reads_to_their_end(served: AsyncLLM) -> None:
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

    asyncio.run(session())
    assert_all_free(served)


def test_others_get_their_turn_while_it_serves(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants the engine during a step has it before the next step, though the thread that steps wants it too."""
    happened: list[str] = []
    collect, asked = Engine._collect, threading.Event()

    def waited_for(engine: Engine, last: int) -> list[RequestOutput]:
        happened.append("step")
        if len(happened) == 3:
            asked.set()
            while not served.llm._turn.wanted:
                time.sleep(0)
        return collect(engine, last)

    async def session() -> None:
        reader = asyncio.create_task(read(served, 9))
        await asyncio.to_thread(asked.wait, 60)
        await served.metrics()
        await reader

    metrics = served.llm.metrics
    monkeypatch.setattr(served.llm, "metrics", lambda: (happened.append("metrics"), metrics())[1])
    monkeypatch.setattr(Engine, "_collect", waited_for)
    asyncio.run(session())
    assert happened[:5] == ["step", "step", "step", "metrics", "step"]


LONG = SamplingParams(seed=9, max_tokens=40, ignore_eos=True)


def test_names_abort_and_leave_the_others(served: AsyncLLM) -> None:
    """While it runs, waits, or has not been read at all; the name is free again afterwards."""

    async def rest(stream: AsyncIterator[StreamChunk]) -> StreamChunk:
        return [chunk async for chunk in stream][-1]

    async def session() -> None:
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
        assert begun.token_ids == whole.outputs[0].token_ids[: len(begun.token_ids)]
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


def test_a_name_is_for_one_request_at_a_time(served: AsyncLLM) -> None:
    async def session() -> None:
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


def test_a_full_queue_refuses_and_takes_again(pair: Pair) -> None:
    """Four run and one waits; what is made before and comes later is refused as well."""

    async def session() -> None:
        async with make_async(pair, max_waiting=1) as served:
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
            make_async(pair, max_waiting=-1)

    asyncio.run(session())


def test_chat_is_generate_behind_the_template(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages[0]['content'] }}{{ 'cd' }}"
    messages = [{"role": "user", "content": "ab"}]

    async def session() -> None:
        assert served.llm.tokenizer is not None
        monkeypatch.setattr(served.llm.tokenizer._inner, "chat_template", template)
        said = [chunk async for chunk in served.chat(messages, params(2), request_id="c")][-1].output
        ids = served.llm.tokenizer._inner("abcd", add_special_tokens=False)["input_ids"]
        plain = [chunk async for chunk in served.generate({"prompt_token_ids": ids}, params(2))][-1].output
        assert said is not None
        assert plain is not None
        assert (said.outputs, said.prompt_token_ids) == (plain.outputs, ids)
        with pytest.raises(ValueError, match="messages"):
            served.chat([], params(2))

    asyncio.run(session())
