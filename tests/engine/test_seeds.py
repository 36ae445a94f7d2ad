"""A request's tokens depend on nothing but the request: not on its neighbours, its place, the batch or the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smcjax import LLM, RequestOutput, SamplingParams
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm

pytestmark = pytest.mark.all_sizes

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("a", {"seed": 1, "max_tokens": 20}),
    ("hello", {"seed": 2, "max_tokens": 7, "temperature": 0.5}),
    ("the quick brown fox", {"seed": 3, "max_tokens": 29, "ignore_eos": True}),
    ("ab" * 20, {"seed": 2, "temperature": 1.7}),
    ("word", {"seed": 0, "max_tokens": 1}),
    ("stop here", {"seed": 2**32 - 1, "max_tokens": 25, "min_tokens": 10, "stop_token_ids": [3, 4, 5]}),
    ("again", {"seed": 77, "max_tokens": 16, "temperature": 0.9}),
]


def ask(llm: LLM, which: list[int]) -> list[RequestOutput]:
    prompts = [REQUESTS[i][0] for i in which]
    return llm.generate(prompts, [SamplingParams(**REQUESTS[i][1]) for i in which], use_tqdm=False)


def fingerprint(output: RequestOutput) -> tuple[Any, ...]:
    """All that must not change: the answer and, to the bit, the population behind it."""
    answer, smc = output.outputs[0], output.smc
    population = () if smc is None else tuple(tuple(p.token_ids) for p in smc.particles)
    return answer.text, tuple(answer.token_ids), answer.finish_reason, population


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[Any, ...]]:
    return [fingerprint(ask(llm, [i])[0]) for i in range(len(REQUESTS))]


def test_neighbours_places_and_batch_sizes_change_nothing(llm: LLM, alone: list[tuple[Any, ...]]) -> None:
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [2, 4], [3, 0, 5], [1, 1, 1, 1, 1], [4, 2, 6, 0, 3]):
        assert [fingerprint(output) for output in ask(llm, order)] == [alone[i] for i in order]
    assert len(set(alone)) == len(REQUESTS), "control"


@pytest.mark.slow
def test_coins_are_a_requests_own(pair: Pair) -> None:
    """Populations that end early are the same alone, in company, after preemptions, and as they stream."""
    coins = {"early_end": True, "control": 0.3}
    everything = list(range(len(REQUESTS)))
    with smc_llm(pair, coins, max_num_seqs=2, num_pages=45, admission="optimistic") as llm:
        outputs = [ask(llm, [i])[0] for i in everything]
        alone = [fingerprint(output) for output in outputs]
        for order in (everything, everything[::-1]):
            llm.engine._scheduler.free.utilization = 0.0
            assert [fingerprint(output) for output in ask(llm, order)] == [alone[i] for i in order]
        assert llm.metrics()["preemptions"] > 0
        for i in (1, 3, 5):
            prompt, params = REQUESTS[i]
            chunks = list(llm.generate_stream(prompt, SamplingParams(**params)))
            assert [token for chunk in chunks for token in chunk.token_ids] == list(alone[i][1])
    given_up = [[particle.log_weight == -np.inf for particle in output.smc.particles] for output in outputs]
    assert sum(map(any, given_up)) >= 3, "no coin was tossed"


@pytest.mark.slow
def test_unseeded_requests_differ_and_the_engine_seed_replays_them(pair: Pair) -> None:
    def session(seed: int) -> list[tuple[Any, ...]]:
        with smc_llm(pair, seed=seed) as fresh:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            first = fresh.generate(["ab"] * 3, params, use_tqdm=False)
            second = fresh.generate("ab", params, use_tqdm=False)
            return [fingerprint(output) for output in [*first, *second]]

    one = session(5)
    assert len(set(one)) == 4
    assert session(5) == one
    assert not set(session(100)) & set(one)


@pytest.mark.slow
def test_a_seeded_request_takes_nothing_from_the_engine(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=9)
    first = llm.generate("ab", params, use_tqdm=False)[0]
    llm.generate(["x", "y"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert fingerprint(llm.generate("ab", params, use_tqdm=False)[0]) == fingerprint(first)
