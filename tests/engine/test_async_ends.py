"""Errors, closing and draining under asyncio: every reader is told, and none waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from smcjax import AsyncLLM, RequestOutput
from smcjax.engine.engine import Engine
from smcjax.errors import RequestsLost
from tests.checkpoints import Pair
from tests.engine.conftest import make_async
from tests.engine.readers import all_come, params, read


def test_errors_reach_their_readers(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
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


def test_an_error_in_another_threads_step_reaches_the_readers(
    served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes the step that fails ends everything in flight, and nobody may wait for ever for what was in it."""
    original = Engine._collect

    def fail_beside(engine: Engine, last: int) -> list[RequestOutput]:
        if threading.current_thread().name != "beside":
            time.sleep(0.02)  # so that the reader is still there
            return original(engine, last)
        monkeypatch.setattr(Engine, "_collect", original)
        raise RuntimeError("broken")

    async def session() -> None:
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
    served: AsyncLLM, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def session() -> None:
        before = await read(served, 2)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "_collect", lambda *_: (_ for _ in ()).throw(error))
            reading = [asyncio.create_task(read(served, seed)) for seed in range(3)]
            results = await asyncio.wait_for(asyncio.gather(*reading, return_exceptions=True), 60)
        told = type(error) if isinstance(error, MemoryError) else RequestsLost
        assert [type(result) for result in results] == [told] * 3
        assert (await read(served, 2)).outputs == before.outputs

    asyncio.run(session())


def test_closing_tells_every_reader(pair: Pair) -> None:
    """Also those that wait when another's last chunk leads to it; then the device memory is free."""

    async def session() -> None:
        served = make_async(pair)
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
        served = make_async(pair)
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
        served = make_async(pair)
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
        await served.close()

    asyncio.run(session())
