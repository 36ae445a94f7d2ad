"""The engine under asyncio: many readers at once, each as if alone; who leaves leaves nothing behind."""

from __future__ import annotations

import asyncio

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
            metrics = served.llm.metrics()
            assert metrics["num_running"] == metrics["num_waiting"] == 0
            assert metrics["kv_pages_free"] == metrics["kv_pages_total"]
            return outputs

    for seed, output in enumerate(asyncio.run(session())):
        assert output.outputs == llm.generate("ab", params(seed), use_tqdm=False)[0].outputs


def test_errors_reach_their_readers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
        async with make(pair) as served:
            with pytest.raises(ValueError, match="the prompt is empty"):
                served.generate("")
            before = await read(served, 2)
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "_collect", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
                results = await asyncio.gather(*(read(served, seed) for seed in range(3)), return_exceptions=True)
            assert [str(result) for result in results] == ["broken"] * 3
            assert (await read(served, 2)).outputs == before.outputs

    asyncio.run(session())
