"""Errors, closing and draining under asyncio: every reader is told, and none waits for ever."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest

from smcjax import RequestOutput
from smcjax.engine.engine import Engine
from smcjax.errors import RequestsLost
from tests.checkpoints import Pair
from tests.engine.readers import all_come, make, params, read


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
                with served.llm._turn, pytest.raises(RuntimeError, match="broken"):
                    served.llm._advance(served.llm.engine)

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
