"""Where no decoder is named SMC answers what it can, an exact decoder the rest; without a draft the target alone.

Whichever answers, the tokens of a seed are those of an LLM of that decoder, and the output says which it was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from smcjax import LLM, SMC, AsyncLLM, Autoregressive, Rejection, RequestOutput, SamplingParams
from smcjax.engine.run import memory
from tests.checkpoints import Pair
from tests.engine.conftest import MAX_MODEL_LEN

FIELDS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "page_size": 4}
PROMPTS = ["ab", "hello", "c", "xyz"]
KEPT = SamplingParams(max_tokens=8)
LEFT = [{"temperature": 0.0}, {"top_p": 0.5}, {"logit_bias": {98: 5.0}}]


def left(number: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, **LEFT[number], **changes)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def told_none(pair: Pair) -> Iterator[LLM]:
    with LLM(pair.target, draft_model=pair.draft, **FIELDS) as llm:
        yield llm


@pytest.fixture(scope="module")
def by_name(pair: Pair) -> Iterator[dict[str, LLM]]:
    """An LLM of each decoder that the rule knows."""
    with (
        LLM(pair.target, draft_model=pair.draft, decoding=SMC(), **FIELDS) as smc,
        LLM(share=smc, decoding=Rejection(), **FIELDS) as rejection,
    ):
        yield {"smc": smc, "rejection": rejection}


@pytest.mark.slow
def test_each_request_is_answered_by_who_can(told_none: LLM, by_name: dict[str, LLM]) -> None:
    """Mixed in one call, in their order, with the seeds that they have by their numbers in one LLM."""
    params = [KEPT, left(0), KEPT, left(1)]
    first = told_none._preparer.count
    outputs = told_none.generate(PROMPTS, params, use_tqdm=False)
    assert [output.decoding for output in outputs] == ["smc", "rejection", "smc", "rejection"]
    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.request_id for output in outputs] == [str(first + place) for place in range(4)]
    assert [output.smc is None for output in outputs] == [False, True, False, True]
    for place, output in enumerate(outputs):
        seeded = dataclasses.replace(params[place], seed=first + place)
        [alone] = by_name[output.decoding].generate(PROMPTS[place], seeded, use_tqdm=False)
        assert alone.outputs == output.outputs
        assert alone.decoding == output.decoding
    assert told_none.metrics()["generated_tokens"] >= 4


def test_what_smc_leaves(told_none: LLM, by_name: dict[str, LLM]) -> None:
    """Streamed as well; a decoder that was named refuses the same."""
    params = left(2, seed=5)
    [output] = told_none.generate("ab", params, use_tqdm=False)
    assert output.decoding == "rejection"
    assert tokens([output]) == tokens(by_name["rejection"].generate("ab", params, use_tqdm=False))
    chunks = list(told_none.generate_stream("ab", params))
    assert chunks[-1].output is not None
    assert chunks[-1].output.outputs == output.outputs
    with pytest.raises(ValueError, match=r"^request 0: .*use decoding=Rejection\(\) or Autoregressive\(\)"):
        by_name["smc"].generate("ab", params)


def test_nothing_runs_where_one_cannot(told_none: LLM) -> None:
    """Whoever is to answer the others; the index is that of the whole list. A control asks for SMC, which refuses."""
    before = told_none.metrics()
    with pytest.raises(ValueError, match=r"^request 2: the prompt is empty"):
        told_none.generate(["ab", "ab", "", "ab"], [KEPT, left(0), left(0), KEPT])
    with pytest.raises(ValueError, match=r"^request 1: temperature is 0, where every draft token"):
        told_none.generate(["ab", "ab"], [KEPT, left(0, control=0.5)])
    assert told_none.metrics() == before


def test_without_a_draft_the_target_answers(pair: Pair, plain: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """And says so once; a decoder that drafts and was named is refused by what it lacks."""
    with caplog.at_level(logging.WARNING, "smcjax"), LLM(pair.target, **FIELDS) as llm:
        for params in (KEPT, left(0), left(1)):
            seeded = dataclasses.replace(params, seed=1)
            [output] = llm.generate("ab", seeded, use_tqdm=False)
            assert output.decoding == "autoregressive"
            assert tokens([output]) == tokens(plain.generate("ab", seeded, use_tqdm=False))
    assert [record.message.startswith("There is no draft, so the target") for record in caplog.records] == [True]
    for decoding in (SMC(), Rejection()):
        with pytest.raises(ValueError, match=r"^model is set and draft_model is not, .*'ngram'.* draft_drop_layers"):
            LLM(pair.target, decoding=decoding)


def test_drafts_that_smc_cannot_weigh(pair: Pair) -> None:
    with LLM(pair.target, draft_model="ngram", **FIELDS) as llm:
        assert llm.decoding == Rejection()


@pytest.mark.slow
def test_under_asyncio(pair: Pair, by_name: dict[str, LLM]) -> None:
    """Names, aborts, draining and closing are those of one engine."""

    async def read(llm: AsyncLLM, params: SamplingParams, name: str) -> RequestOutput:
        chunks = [chunk async for chunk in llm.generate("ab", params, request_id=name)]
        assert chunks[-1].output is not None
        return chunks[-1].output

    async def all_of_it() -> None:
        llm = AsyncLLM(pair.target, draft_model=pair.draft, **FIELDS)
        asked = [SamplingParams(max_tokens=8, seed=3), left(0, seed=3)]
        outputs = await asyncio.gather(*(read(llm, one, str(n)) for n, one in enumerate(asked)))
        assert [(one.request_id, one.decoding) for one in outputs] == [("0", "smc"), ("1", "rejection")]
        for one, params in zip(outputs, asked, strict=True):
            assert by_name[one.decoding].generate("ab", params, use_tqdm=False)[0].outputs == one.outputs
        assert (await llm.metrics())["generated_tokens"] == sum(one.metrics.generated_tokens for one in outputs)
        long = llm.generate("ab", SamplingParams(temperature=0, ignore_eos=True), request_id="long")
        with pytest.raises(ValueError, match="request_id is 'long', which a request in flight has"):
            llm.generate("ab", KEPT, request_id="long")
        await anext(long)
        assert llm.abort("long")
        assert [chunk async for chunk in long][-1].output.outputs[0].finish_reason == "abort"
        await llm.drain()
        with pytest.raises(RuntimeError, match="draining"):
            llm.generate("ab", left(0))
        await llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate("ab", left(0))

    asyncio.run(all_of_it())


def test_both_fit_the_memory_of_a_gpu(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact decoder's pages are left to it when SMC takes its own."""
    asked: list[float | None] = []
    choose = memory.choose_num_pages

    def noted(num_pages: float | None, **fields: Any) -> int:
        asked.append(num_pages)
        return choose(num_pages, **fields)

    monkeypatch.setattr("smcjax.engine.llm.choose_num_pages", noted)
    with LLM(pair.target, draft_model=pair.draft, **FIELDS) as llm:
        llm.generate("ab", left(0), use_tqdm=False)
    with LLM(pair.target, decoding=Autoregressive(), **FIELDS):
        pass
    assert asked[:2] == pytest.approx([8 / 9, 1 / 9])
    assert asked[2:] == [None]
