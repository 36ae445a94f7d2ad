"""Prompts that begin alike: prefilled once, and every answer as if each had been prefilled from its start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from smcjax import LLM, Autoregressive, RequestOutput, SamplingParams
from smcjax.engine.schedule.prefix_cache import PrefixCache
from smcjax.engine.schedule.scheduler import ChunkLengths
from tests.checkpoints import Pair
from tests.engine.conftest import MAX_MODEL_LEN, lend, smc_llm
from tests.engine.test_engine import add, drain, fingerprint, sound

PAGE_SIZE, CHUNK, PAGES = 4, 8, 32
RANDOM = np.random.default_rng(0).integers(0, 256, (3, MAX_MODEL_LEN)).tolist()


def shortened(llm: LLM) -> LLM:
    """Chunks of prefill of two pages, so that prompts take some; memory for little more than the largest request."""
    llm.engine.runner.chunks = llm.engine._scheduler.chunks = ChunkLengths(CHUNK, CHUNK)
    return lend(llm, PAGES)


@pytest.fixture(scope="module")
def caching(pair: Pair, llm: LLM) -> Iterator[LLM]:
    """`llm`, whose cached pages often give way."""
    with smc_llm(pair) as caching:
        yield shortened(caching)


@pytest.fixture(scope="module")
def forgetting(pair: Pair, llm: LLM) -> Iterator[LLM]:
    with smc_llm(pair, enable_prefix_caching=False) as forgetting:
        yield shortened(forgetting)


def prompt(shared: int, own: int, family: int = 1) -> dict[str, list[int]]:
    """`shared` tokens as all have them, then some of the family's own."""
    return {"prompt_token_ids": RANDOM[0][:shared] + RANDOM[family][:own]}


def ask(llm: LLM, prompts: Sequence[Any], seed: int = 0, max_tokens: int = 9) -> list[RequestOutput]:
    params = [SamplingParams(seed=seed + i, max_tokens=max_tokens) for i in range(len(prompts))]
    return llm.generate(prompts, params, use_tqdm=False)


def exact(output: RequestOutput) -> tuple[Any, ...]:
    """All of an answer, to the last bit."""
    assert output.smc is not None
    return *fingerprint(output), output.smc.log_evidence, output.smc.log_weights.tolist()


@settings(max_examples=16)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(1, 2)), min_size=1, max_size=6),
    st.integers(0, 10**6),
)
def test_reuse_changes_no_token(caching: LLM, forgetting: LLM, shapes: list[tuple[int, int, int]], seed: int) -> None:
    prompts = [prompt(*shape) for shape in shapes]
    with_cache, without = ask(caching, prompts, seed), ask(forgetting, prompts, seed)
    assert [fingerprint(output) for output in with_cache] == [fingerprint(output) for output in without]
    assert all(output.metrics.num_cached_tokens == 0 for output in without)
    sound(caching.engine)
    assert caching.metrics()["kv_pages_free"] == PAGES


def test_one_by_one_it_changes_no_bit(caching: LLM, forgetting: LLM) -> None:
    """Each token is computed in the same place of the same chunk by the same program, cached neighbours or not."""
    reused = 0
    for seed, shape in enumerate([(20, 3), (20, 5), (17, 1), (24, 0), (24, 0), (8, 9), (16, 1), (31, 2)]):
        (one,), (other,) = ask(caching, [prompt(*shape)], seed), ask(forgetting, [prompt(*shape)], seed)
        assert exact(one) == exact(other)
        reused += one.metrics.num_cached_tokens
    assert reused >= 100


def test_wrong_pages_would_show(caching: LLM, forgetting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: keys that do not look at the tokens give one prompt the KV of another."""

    def keys(self: PrefixCache, token_ids: Sequence[int]) -> list[bytes]:
        return [b"wrong%d" % page for page in range(len(token_ids) // self.page_size)]

    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "keys", keys)
        prompts = [{"prompt_token_ids": tokens[:20]} for tokens in RANDOM]
        wrong = [fingerprint(ask(caching, [one], max_tokens=20)[0]) for one in prompts]
    assert wrong != [fingerprint(ask(forgetting, [one], max_tokens=20)[0]) for one in prompts]


def test_all_full_pages_before_the_last_token_are_reused(caching: LLM) -> None:
    caching.engine.reset()
    before = caching.metrics()
    for length, again in ((1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (24, 20), (25, 24)):
        asked = {"prompt_token_ids": [length, *RANDOM[2][: length - 1]]}
        first, second = (ask(caching, [asked])[0].metrics.num_cached_tokens for _ in range(2))
        assert (first, second) == (0, again)
    after = caching.metrics()
    assert after["prefix_cache_queries"] - before["prefix_cache_queries"] == 2 * (1 + 4 + 5 + 8 + 9 + 24 + 25)
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] == 4 + 4 + 8 + 20 + 24
    assert 0 < after["kv_pages_cached"] <= PAGES
    assert after["kv_pages_free"] == PAGES


def test_a_prompt_is_shared_while_it_is_still_read(caching: LLM) -> None:
    """Its pages are there for others as soon as their chunk is enqueued; who comes at the same time reads its own."""
    caching.engine.reset()
    long, other = (caching.request(prompt(30, 1, family), SamplingParams(max_tokens=2)) for family in (1, 2))
    caching.engine.add_request(long)
    caching.engine.step()
    caching.engine.step()  # 16 tokens of it
    caching.engine.add_request(other)
    outputs = drain(caching.engine)
    assert outputs[long.request_id].metrics.num_cached_tokens == 0
    assert outputs[other.request_id].metrics.num_cached_tokens == 16
    caching.engine.reset()
    together = ask(caching, [prompt(8, 1), prompt(8, 2)])
    assert [output.metrics.num_cached_tokens for output in together] == [0, 0]
    sound(caching.engine)


def test_an_error_or_a_reset_empties_the_cache(caching: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(caching, [prompt(20, 1)])
    assert caching.metrics()["kv_pages_cached"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(caching.engine, "_collect", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ask(caching, [prompt(20, 1)])
    assert caching.metrics()["kv_pages_cached"] == 0
    assert not np.asarray(caching.engine.runner.cached).any()
    assert ask(caching, [prompt(20, 1)])[0].metrics.num_cached_tokens == 0


def test_aborts_leave_what_is_cached_whole(caching: LLM, forgetting: LLM) -> None:
    """A prompt that is aborted half-way has cached what was read of it, and nothing else."""
    expected = fingerprint(ask(forgetting, [prompt(30, 5)], seed=3)[0])
    for steps in range(5):
        caching.engine.reset()
        request = caching.request(prompt(30, 5), SamplingParams(max_tokens=9))
        caching.engine.add_request(request)
        for _ in range(steps):
            caching.engine.step()
        caching.engine.abort(request.request_id)
        sound(caching.engine)
        drain(caching.engine)
        again = ask(caching, [prompt(30, 5)], seed=3)[0]
        assert fingerprint(again) == expected
        assert again.metrics.num_cached_tokens == min(CHUNK * steps, 32)


@pytest.mark.slow
def test_the_target_alone_reuses_too(pair: Pair) -> None:
    fields: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "page_size": PAGE_SIZE}
    prompts = [prompt(20, own, family) for own in (1, 6) for family in (1, 2, 1)]
    answers = []
    for caches in (True, False):
        with LLM(pair.target, decoding=Autoregressive(), enable_prefix_caching=caches, **fields) as llm:
            outputs = ask(llm, prompts, max_tokens=20)
            answers.append([output.outputs for output in outputs])
            assert (sum(output.metrics.num_cached_tokens for output in outputs) > 60) is caches
    assert answers[0] == answers[1]


def test_what_is_no_switch_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"^enable_prefix_caching must be True or False, got 1\.$"):
        smc_llm(pair, enable_prefix_caching=1)


def test_added_one_by_one(caching: LLM, forgetting: LLM) -> None:
    """Requests that wait for memory, with prompts that come again, results read late."""
    caching.engine._lag, numbers = 1, [3, 8, 3, 5, 8, 8, 10, 3, 11, 10]
    names = []
    outputs: dict[str, RequestOutput] = {}
    for number in numbers:
        names.append(add(caching, number))
        outputs |= {output.request_id: output for output in caching.engine.step()}
        sound(caching.engine)
    outputs |= drain(caching.engine)
    caching.engine._lag = 0
    assert sum(output.metrics.num_cached_tokens for output in outputs.values()) > 0
    alone = {}
    for number in set(numbers):
        name = add(forgetting, number)
        alone[number] = fingerprint(drain(forgetting.engine)[name])
    assert [fingerprint(outputs[name]) for name in names] == [alone[number] for number in numbers]
