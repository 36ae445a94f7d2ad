"""The engine under asyncio: many readers at once, each as if alone; who leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from smcjax import LLM, SMC, AsyncLLM, RequestOutput, SamplingParams
from smcjax.engine.engine import Engine
from tests.checkpoints import Pair
from tests.engine.conftest import MAX_MODEL_LEN


def make(pair: Pair) -> AsyncLLM:
    decoding = SMC(n_particles=4, gamma=3, trace=True)
    return AsyncLLM(
        pair.target,
        draft_model=pair.draft,
        decoding=decoding,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        page_size=4,
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
            await leaver.aclose()  # type: ignore[attr-defined]
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
