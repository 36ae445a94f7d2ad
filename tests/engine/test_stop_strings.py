"""Stop strings end the work: deterministically, without a bias, and early."""

from __future__ import annotations

import collections
import contextlib
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest

from smcjax import LLM, RequestOutput, SamplingParams
from smcjax.engine.results.stopping import StopStrings
from tests.checkpoints import Pair
from tests.engine.conftest import lend, smc_llm

NEVER = "never there"


def ask(number: int, **changes: Any) -> SamplingParams:
    stops = [["a", "e"], ["th", "q", "b"], ["i"], list("aeiou")][number % 4]
    fields = {"seed": number, "max_tokens": 40, "ignore_eos": number % 3 == 0, "stop": stops, **changes}
    return SamplingParams(**fields)


def fingerprint(output: RequestOutput) -> Any:
    smc = output.smc
    answer = output.outputs[0]
    population = None if smc is None else ([p.token_ids for p in smc.particles], smc.selected)
    history = None if smc is None or smc.trace is None else smc.trace.ancestors.tolist()
    return answer.text, answer.token_ids, answer.finish_reason, output.metrics.cycles, population, history


def generate(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("which", ["llm", "plain", "rejecting"])
def test_the_same_however_the_host_reads(which: str, request: pytest.FixtureRequest) -> None:
    """Results read at once or one cycle late, alone or in a mix, whole or streamed: the same in every detail."""
    llm: LLM = request.getfixturevalue(which)
    prompts = ["ab" + "c" * number for number in range(8)]
    params = [ask(number) for number in range(8)]
    assert llm.engine._lag == 0
    alone = [fingerprint(generate(llm, prompt, one)[0]) for prompt, one in zip(prompts, params, strict=True)]
    assert any(cycles < 9 for *_, cycles, _, _ in alone)
    assert [fingerprint(output) for output in generate(llm, prompts, params)] == alone
    with mock.patch.object(llm.engine, "_lag", 1):
        assert [fingerprint(output) for output in generate(llm, prompts, params)] == alone
        late = [fingerprint(generate(llm, prompt, one)[0]) for prompt, one in zip(prompts, params, strict=True)]
        assert late == alone
        streams = [list(llm.generate_stream(*pair)) for pair in zip(prompts, params, strict=True)]
    streams += [list(llm.generate_stream(*pair)) for pair in zip(prompts, params, strict=True)]
    for chunks, expected in zip(streams, [*alone, *alone], strict=True):
        assert chunks[-1].output is not None
        assert fingerprint(chunks[-1].output) == expected
        assert "".join(chunk.text for chunk in chunks) == expected[0]
        assert [token for chunk in chunks for token in chunk.token_ids] == expected[1]
    metrics = llm.metrics()
    assert metrics["num_running"] == metrics["num_waiting"] == 0
    assert metrics["kv_pages_free"] == metrics["kv_pages_total"]


@pytest.mark.parametrize("which", ["llm", "plain", "rejecting"])
def test_a_first_token_that_stops_ends_the_work_after_two_cycles(which: str, request: pytest.FixtureRequest) -> None:
    """A host that reads one cycle late hears of the first tokens when the second cycle is enqueued."""
    llm: LLM = request.getfixturevalue(which)
    letters = list("abcdefghijklmnopqrstuvwxyz ")
    for lag in (0, 1):
        with mock.patch.object(llm.engine, "_lag", lag):
            outputs = generate(llm, ["ab", "abc"], SamplingParams(seed=1, max_tokens=40, ignore_eos=True, stop=letters))
        for output in outputs:
            answer = output.outputs[0]
            assert (answer.text, len(answer.token_ids), answer.finish_reason) == ("", 1, "stop")
            assert output.metrics.cycles == 2


@pytest.mark.slow
def test_the_same_after_preemptions(pair: Pair, llm: LLM) -> None:
    prompts, params = ["ab" * 3] * 6, [ask(number) for number in range(6)]
    alone = [fingerprint(generate(llm, prompt, one)[0]) for prompt, one in zip(prompts, params, strict=True)]
    with smc_llm(pair, admission="optimistic") as tight:
        for lag in (0, 1):
            lend(tight, 45).engine._lag = lag
            assert [fingerprint(output) for output in generate(tight, prompts, params)] == alone
        assert tight.metrics()["preemptions"] > 0


@pytest.mark.parametrize("which", ["plain", "rejecting"])
def test_exact_decoders_give_the_answer_of_the_full_run(which: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(which)
    for number in range(12):
        early = generate(llm, "ab", ask(number))[0]
        with (
            mock.patch.object(StopStrings, "begin", return_value=False),
            mock.patch.object(StopStrings, "advance", return_value=False),
        ):
            full = generate(llm, "ab", ask(number))[0]
        assert fingerprint(early)[:3] == fingerprint(full)[:3]
        assert early.metrics.cycles <= full.metrics.cycles


def test_cycles_are_saved(llm: LLM) -> None:
    """Requests that meet a stop string early take under 4 cycles on average, where their cap of 40 tokens takes 10."""
    params = [ask(number, stop=list("abcdefghijklm"), ignore_eos=True) for number in range(20)]
    early = generate(llm, ["ab"] * 20, params)
    never = generate(llm, ["ab"] * 20, [ask(number, stop=NEVER, ignore_eos=True) for number in range(20)])
    assert {output.metrics.cycles for output in never} == {10}
    assert np.mean([output.metrics.cycles for output in early]) < 4
    assert {output.outputs[0].finish_reason for output in early} == {"stop"}


def any_row(rows: StopStrings, *_: Any) -> bool:
    """Ends the work too early, as a control: returns True as soon as any row holds a stop string."""
    return any(row.stopped for row in rows._rows)


REQUESTS = 600
FIELDS: dict[str, Any] = {"max_tokens": 16, "stop": list("aeiou"), "ignore_eos": True}


def shares(outputs: list[RequestOutput], weights: list[float]) -> dict[str, tuple[float, float]]:
    """Each kind of answer's share of the weights, by its end and its length, and that share's standard error."""
    values = collections.defaultdict(lambda: np.zeros(len(outputs)))
    for i, (output, weight) in enumerate(zip(outputs, weights, strict=True)):
        answer = output.outputs[0]
        values[f"{answer.finish_reason} {min(len(answer.token_ids) // 2, 5)}"][i] = weight
    return {name: (v.mean(), v.std() / math.sqrt(len(v))) for name, v in values.items()}


@pytest.fixture(scope="module")
def plainly(crowd: LLM) -> dict[str, tuple[float, float]]:
    """Shares of the target alone."""
    params = [SamplingParams(seed=number, **FIELDS) for number in range(REQUESTS)]
    return shares(generate(crowd, ["ab"] * REQUESTS, params), [1.0] * REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_the_law_of_the_answer(pair: Pair, plainly: dict[str, tuple[float, float]], wrong: bool) -> None:
    """E[Ẑ·1(answer = x)] is the target's probability of x, here of the length of the text before the first stop.

    Against the target alone, run to the cap. The control ends when any row holds a stop string.
    """
    params = [SamplingParams(seed=number, **FIELDS) for number in range(REQUESTS)]
    same = Pair(pair.target, pair.target)  # the draft differs by its temperature, so that no weight is extreme
    config = {"n_particles": 3, "gamma": 1, "trace": False, "draft_temperature": 1.25}
    with smc_llm(same, config, max_num_seqs=64) as llm, contextlib.ExitStack() as stack:
        if wrong:
            advance = StopStrings.advance
            patch = mock.patch.object(StopStrings, "advance", lambda rows, *of: (advance(rows, *of), any_row(rows))[1])
            stack.enter_context(patch)
        outputs = generate(llm, ["ab"] * REQUESTS, params)
    assert np.mean([output.metrics.cycles for output in outputs]) < 7  # of 8
    weighted = shares(outputs, [math.exp(output.smc.log_evidence) for output in outputs if output.smc is not None])
    scores = {}
    for name in weighted.keys() | plainly.keys():
        (a, da), (b, db) = (table.get(name, (0.0, 1e-3)) for table in (weighted, plainly))
        scores[name] = abs(a - b) / math.hypot(da, db)
    if wrong:
        assert max(scores.values()) > 8, scores
    else:
        assert max(scores.values()) < 4, scores
