"""Readers of `AsyncLLM` who go: pages are free after the next step, whichever way they read and left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import pytest

from smcjax import AsyncLLM, Autoregressive, SamplingParams, StreamChunk
from tests.checkpoints import Pair

# Hundreds of cycles, of which the first is heard of at once.
LONG = SamplingParams(seed=1, max_tokens=480, ignore_eos=True)
SHORT = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def served(pair: Pair) -> Iterator[AsyncLLM]:
    served = AsyncLLM(pair.target, decoding=Autoregressive(), max_model_len=512, max_num_seqs=2)
    served.llm.generate(["ab"] * 2, SHORT, use_tqdm=False)  # compiled from here on
    yield served
    asyncio.run(served.close())


async def whole(served: AsyncLLM, params: SamplingParams = LONG) -> list[StreamChunk]:
    """A whole answer, gathered."""
    return [chunk async for chunk in served.generate("ab", params)]


async def stuck(served: AsyncLLM) -> None:
    """A reader who is busy with his first chunk when he is told to go."""
    async for _ in served.generate("ab", LONG):
        await asyncio.Event().wait()


async def stuck_and_careful(served: AsyncLLM) -> None:
    async with contextlib.aclosing(served.generate("ab", LONG)) as chunks:
        async for _ in chunks:
            await asyncio.Event().wait()


async def freed(served: AsyncLLM, steps: int) -> None:
    """Asserts that everything is free, no more than one step after `steps` of them, without anybody's asking."""
    for _ in range(5000):
        if not served.llm.engine._scheduler:
            break
        await asyncio.sleep(0.001)
    assert not served.llm.engine._scheduler
    metrics = await served.metrics()
    assert metrics["num_running"] == metrics["num_waiting"] == 0
    assert metrics["steps"] <= steps + 1
    assert metrics["kv_pages_free"] == metrics["kv_pages_total"]
    assert served._inboxes == {}


@pytest.mark.parametrize("reader", [whole, stuck, stuck_and_careful])
def test_a_cancelled_task_frees_its_pages_at_the_next_step(
    served: AsyncLLM, reader: Callable[[AsyncLLM], Awaitable[object]]
) -> None:
    async def session() -> None:
        task = asyncio.ensure_future(reader(served))
        while not served.llm.engine._running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        with served.llm._turn:  # so that no step begins between the two
            assert served.llm.engine.metrics()["num_running"] == 1, "control"
            steps = served.llm.engine._round
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        del task
        await freed(served, steps)

    asyncio.run(session())


@pytest.mark.parametrize("close", [True, False])
def test_an_abandoned_stream_frees_its_pages_at_the_next_step(served: AsyncLLM, close: bool) -> None:
    """Closed, or just let go of, after a chunk."""

    async def session() -> None:
        chunks = served.generate("ab", LONG)
        await anext(chunks)
        with served.llm._turn:
            assert served.llm.engine.metrics()["num_running"] == 1, "control"
            steps = served.llm.engine._round
            if close:
                await chunks.aclose()
            del chunks
        await freed(served, steps)

    asyncio.run(session())


def test_a_gathered_answer_goes_with_the_timeout(served: AsyncLLM) -> None:
    """Many of them, of which nothing is left, and one that comes behind is answered."""

    async def session() -> None:
        expected = await whole(served, SHORT)
        for _ in range(3):
            gathered = [asyncio.wait_for(whole(served), 0.02) for _ in range(8)]
            results = await asyncio.gather(*gathered, return_exceptions=True)
            assert {type(result) for result in results} == {TimeoutError}
        assert (await whole(served, SHORT))[-1].output.outputs == expected[-1].output.outputs
        await freed(served, int((await served.metrics())["steps"]))

    asyncio.run(session())
