"""Log-probabilities that requests ask for, beside the dense forward's: of answers, of prompts, whole and streamed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from smcjax import LLM, RequestOutput, SamplingParams, StreamChunk
from smcjax.engine.results.outputs import TokenLogprob
from smcjax.engine.schedule.scheduler import ChunkLengths
from smcjax.model import logits
from tests.engine.conftest import MAX_MODEL_LEN
from tests.engine.test_engine import drain

_logits = jax.jit(logits, static_argnums=0)
PROMPTS: list[Any] = [{"prompt_token_ids": [97 + i % 7 for i in range(n)]} for n in (21, 3, 9)]
PARAMS = SamplingParams(seed=3, max_tokens=14, temperature=0.7, logprobs=5, ignore_eos=True)


@pytest.fixture(params=["llm", "plain", "rejecting"])
def any_llm(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(request.param)


def dense(llm: LLM, tokens: list[int]) -> np.ndarray:
    """The target's logits [T, V] behind each token, by a forward over all of them."""
    padded = np.zeros((1, MAX_MODEL_LEN), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_logits(llm.models.target, llm.models.target_params, padded)[0, : len(tokens)], np.float64)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def laws(llm: LLM, output: RequestOutput, temperature: float) -> np.ndarray:
    """log p_T [T, V] that each token of the answer was drawn from."""
    start, answer = len(output.prompt_token_ids), output.outputs[0].token_ids
    return log_softmax(dense(llm, output.prompt_token_ids + answer)[start - 1 : -1] / temperature)


def farthest(law: np.ndarray, tokens: list[int], own: list[float], top: list[list[TokenLogprob]], n: int) -> float:
    """The largest difference between reported log-probabilities and these laws, whose n largest must be there."""
    assert len(law) == len(tokens) == len(own) == len(top)
    worst = 0.0
    for of_place, token, logprob, likeliest in zip(law, tokens, own, top, strict=True):
        possible = min(n, int(np.isfinite(of_place).sum()))
        values = [value for _, value in likeliest]
        assert len({one.token_id for one in likeliest}) == len(likeliest) == possible
        assert values == sorted(values, reverse=True)
        largest = np.sort(of_place)[::-1][:possible]
        worst = max(worst, abs(logprob - of_place[token]), *np.abs(np.array(values) - largest))
        worst = max(worst, *(abs(one.logprob - of_place[one.token_id]) for one in likeliest))
    return worst


def test_the_likeliest_tokens_of_every_position(any_llm: LLM) -> None:
    """Of the answer that was selected, by the law that it was drawn from; of another temperature's, far off."""
    outputs = any_llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    plain = any_llm.generate(PROMPTS, dataclasses.replace(PARAMS, logprobs=None), use_tqdm=False)
    for output, without in zip(outputs, plain, strict=True):
        answer = output.outputs[0]
        assert answer.token_ids == without.outputs[0].token_ids
        assert (without.outputs[0].logprobs, without.outputs[0].top_logprobs) == (None, None)
        assert answer.logprobs is not None
        assert answer.top_logprobs is not None
        given = (answer.token_ids, answer.logprobs, answer.top_logprobs, 5)
        assert farthest(laws(any_llm, output, 0.7), *given) < 1e-4
        assert farthest(laws(any_llm, output, 0.8), *given) > 1e-2, "control"


def test_chunks_bring_their_tokens_scores(any_llm: LLM) -> None:
    for count in (0, 3):
        asked = dataclasses.replace(PARAMS, logprobs=count)
        chunks = list(any_llm.generate_stream(PROMPTS[0], asked))
        output = chunks[-1].output
        assert output is not None
        answer = output.outputs[0]
        assert len(chunks) > 2
        joined = [logprob for chunk in chunks for logprob in chunk.logprobs or []]
        np.testing.assert_allclose(joined, answer.logprobs or [], atol=1e-5)
        assert all(len(chunk.logprobs or []) == len(chunk.token_ids) for chunk in chunks)
        if not count:
            assert answer.top_logprobs is None
            assert all(chunk.top_logprobs is None for chunk in chunks)
            continue
        top = [one for chunk in chunks for one in chunk.top_logprobs or []]
        assert farthest(laws(any_llm, output, 0.7), answer.token_ids, joined, top, 3) < 1e-4


@pytest.mark.slow
def test_what_is_impossible_is_no_alternative(rejecting: LLM) -> None:
    """Outside top_k nothing has a probability; greedy laws are at 1."""
    asked = dataclasses.replace(PARAMS, top_k=3, logprobs=20)
    greedy = dataclasses.replace(PARAMS, temperature=0, logprobs=2)
    cut, certain = rejecting.generate(PROMPTS[:2], [asked, greedy], use_tqdm=False)
    assert {len(top) for top in cut.outputs[0].top_logprobs or []} == {3}
    for top in cut.outputs[0].top_logprobs or []:
        assert sum(np.exp(value) for _, value in top) == pytest.approx(1, abs=1e-5)
    answer = certain.outputs[0]
    assert answer.logprobs is not None
    assert answer.top_logprobs is not None
    assert [top[0].token_id for top in answer.top_logprobs] == answer.token_ids
    assert farthest(laws(rejecting, certain, 1.0), answer.token_ids, answer.logprobs, answer.top_logprobs, 2) < 1e-4


def test_a_stop_string_cuts_the_scores_too(plain: LLM) -> None:
    whole = plain.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].outputs[0]
    stop = whole.text[6:8]
    cut = plain.generate(PROMPTS[0], dataclasses.replace(PARAMS, stop=stop), use_tqdm=False)[0].outputs[0]
    assert 0 < len(cut.token_ids) < len(whole.token_ids)
    assert cut.logprobs == (whole.logprobs or [])[: len(cut.token_ids)]
    assert cut.top_logprobs == (whole.top_logprobs or [])[: len(cut.token_ids)]


@pytest.mark.slow
def test_prompts_are_scored_whatever_is_cached(plain: LLM) -> None:
    """In chunks of eight tokens, one prompt or several together; a request that asks takes nothing from the cache."""
    engine, before, unasked = (
        plain.engine,
        plain.engine.runner.chunks,
        SamplingParams(seed=3, max_tokens=4, ignore_eos=True),
    )
    engine.reset()  # the cache too
    engine.runner.chunks = engine._scheduler.chunks = ChunkLengths(8, 8)
    try:
        asked = dataclasses.replace(unasked, prompt_logprobs=4)
        for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[:1]):  # the last is in the cache
            expected = [one.outputs for one in plain.generate(prompts, unasked, use_tqdm=False)]
            outputs = plain.generate(prompts, asked, use_tqdm=False)
            assert [output.outputs for output in outputs] == expected
            for output in outputs:
                assert output.metrics.num_cached_tokens == 0
                tokens = output.prompt_token_ids
                assert output.prompt_logprobs is not None
                assert output.prompt_top_logprobs is not None
                assert (output.prompt_logprobs[0], output.prompt_top_logprobs[0]) == (None, None)
                law = log_softmax(dense(plain, tokens)[:-1])
                given = (tokens[1:], output.prompt_logprobs[1:], output.prompt_top_logprobs[1:], 4)
                assert farthest(law, *given) < 1e-4
                assert farthest(np.roll(law, 1, axis=0), *given) > 1e-2, "control"
        assert plain.generate(PROMPTS[:1], unasked, use_tqdm=False)[0].metrics.num_cached_tokens > 0, "control"
        own = plain.generate(PROMPTS[0], dataclasses.replace(asked, prompt_logprobs=0), use_tqdm=False)[0]
        assert own.prompt_top_logprobs is None
        assert len(own.prompt_logprobs or []) == 21
        assert plain.metrics()["kv_pages_free"] == plain.metrics()["kv_pages_total"]
    finally:
        engine.reset()
        engine.runner.chunks = engine._scheduler.chunks = before


@pytest.mark.slow
def test_in_any_company(plain: LLM) -> None:
    """Beside requests that ask for nothing, for fewer or for more; and these get nothing that they did not ask for."""
    asked = [PARAMS, dataclasses.replace(PARAMS, logprobs=None), dataclasses.replace(PARAMS, logprobs=1, seed=9)]
    asked[2] = dataclasses.replace(asked[2], prompt_logprobs=3)
    alone = [plain.generate(p, one, use_tqdm=False)[0] for p, one in zip(PROMPTS, asked, strict=True)]
    engine, chunks, names = plain.engine, dict[str, list[StreamChunk]](), list[str]()
    for prompt, one in zip(PROMPTS, asked, strict=True):
        request = plain.request(prompt, one)
        engine.add_request(request, stream=True)
        names.append(request.request_id)
        engine.step()
    outputs = drain(engine)
    chunks = {name: engine.chunks(name) for name in names}
    for name, expected in zip(names, alone, strict=True):
        got, want = outputs[name].outputs[0], expected.outputs[0]
        assert got.token_ids == want.token_ids
        assert (got.logprobs is None) == (want.logprobs is None)
        np.testing.assert_allclose(got.logprobs or [], want.logprobs or [], atol=1e-5)
        assert [len(top) for top in got.top_logprobs or []] == [len(top) for top in want.top_logprobs or []]
        assert (outputs[name].prompt_logprobs is None) == (expected.prompt_logprobs is None)
        if want.logprobs is None:
            assert all(chunk.logprobs is None and chunk.prompt_logprobs is None for chunk in chunks[name])


@pytest.mark.slow
def test_who_asks_for_nothing_runs_the_programs_as_they_were(plain: LLM, llm: LLM) -> None:
    """Scores make programs of their own: without them no vocabulary is searched and nothing more comes back."""
    for one in (plain, llm):
        runner = one.engine.runner
        program = runner.program
        assert not program.features
        _, state = runner._jobs.state(2)

        def step(program: Any, runner: Any = runner, state: Any = state) -> tuple[str, int]:
            traced = jax.make_jaxpr(program.step)(runner.params, state)
            return str(traced), len(traced.out_avals)

        text, results = step(program)
        scored, more = step(dataclasses.replace(program, features=frozenset({"logprobs"})))
        assert "top_k" not in text
        assert "top_k" in scored, "control"
        assert more == results + 3
        assert step(dataclasses.replace(program, features=frozenset({"prompt_logprobs"}))) == (text, results)
        one.generate(PROMPTS[:2], dataclasses.replace(PARAMS, logprobs=None), use_tqdm=False)
        before = one.metrics()["compilations"]
        one.generate(PROMPTS[:2], dataclasses.replace(PARAMS, logprobs=0), use_tqdm=False)
        assert one.metrics()["compilations"] == before, "an answer's own log-probabilities are there in any case"
