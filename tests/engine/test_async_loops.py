"""Event loops of readers: one after the other and at once, woken while the device works."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from smcjax import LLM, AsyncLLM, SamplingParams, StreamChunk
from smcjax.engine import async_llm
from tests.checkpoints import Pair
from tests.engine.conftest import make_async
from tests.engine.readers import all_come, assert_all_free, params, read


def test_event_loops_one_after_the_other(pair: Pair, llm: LLM) -> None:
    expected = [llm.generate("ab", params(seed), use_tqdm=False)[0].outputs for seed in range(3)]
    held = {id(array) for array in jax.live_arrays()}
    served = make_async(pair)
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
    served, left = make_async(pair), []

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
    served, outputs = make_async(pair), {}

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
    cancelled: list[str] = []
    news: Any = [(one, [one.request.request_id]) for one in inboxes]
    served: Any = SimpleNamespace(llm=SimpleNamespace(_cancel=cancelled.extend), _news=news)
    AsyncLLM._hand_out(served)
    AsyncLLM._hand_out(served)  # what has been handed out is gone
    assert woken == loops
    assert cancelled == ["d"]
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


@pytest.fixture
def lent(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The session's `LLM`, which `AsyncLLM()` serves in this test, and which compiles as before behind it."""
    monkeypatch.setattr(async_llm, "LLM", lambda: llm)
    monkeypatch.setattr(llm.engine.programs, "in_background", True)
    return llm


def test_readers_are_woken_while_the_device_works(lent: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are handed out when the next cycle is enqueued, and before the engine waits for its results."""
    noted, llm = Noted(monkeypatch), lent
    happened = noted.happened
    noted.calls(llm.engine.runner, "step", "enqueue")
    noted.calls(llm.engine, "_collect", "wait")
    noted.calls(AsyncLLM, "_hand_out", "hand out", lambda served: bool(served._news))
    served = AsyncLLM()
    output = asyncio.run(read(served, seed=19))
    asyncio.run(served.drain())
    *early, last = [at for at, event in enumerate(happened) if event == "hand out"]
    assert len(early) >= output.metrics.cycles / 2, "one a cycle that brings anything"
    assert {(happened[at - 1], happened[at + 1]) for at in early} == {("enqueue", "wait")}
    assert happened[last - 1] == "wait", "the end is not kept until there is something else to do"


@pytest.mark.parametrize("overlap", [False, True])
def test_an_end_is_handed_out_at_once(lent: LLM, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another request goes on, behind whose next cycle all other chunks are handed out."""
    noted, llm = Noted(monkeypatch), lent
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
        with served.llm._turn:  # so that both begin together
            reading = [asyncio.create_task(read(served, seed)) for seed in (1, 9)]
            await all_come(served, 2)
        await asyncio.gather(*reading)
        await served.drain()

    asyncio.run(session())
    ended = noted.happened.index("an end")
    after = noted.happened[ended + 1 :]
    assert after[0] == "hand out"
    assert after.count("enqueue") > 3, "the other one goes on"
