"""Readers of an `AsyncLLM`, and waiting until they have come or gone."""

from __future__ import annotations

import asyncio
import time

from smcjax import AsyncLLM, RequestOutput, SamplingParams


def params(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=3 + 4 * seed, ignore_eos=True)


async def read(llm: AsyncLLM, seed: int, delay: float = 0.0) -> RequestOutput:
    """Reads one answer to its end, to which its chunks add up."""
    await asyncio.sleep(delay)
    chunks = [chunk async for chunk in llm.generate("ab", params(seed))]
    output = chunks[-1].output
    assert output is not None
    assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
    assert [token for chunk in chunks for token in chunk.token_ids] == output.outputs[0].token_ids
    return output


async def all_come(served: AsyncLLM, count: int) -> None:
    """Waits until so many requests are in flight."""
    while len(served._arriving) + len(served._inboxes) < count:
        await asyncio.sleep(0)


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
