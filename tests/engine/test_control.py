"""SMC with a control through the engine: unequal rows in any mix, streamed, preempted; what is said.

Then requests that bring a control of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, SMC, RequestOutput, SamplingParams
from smcjax.engine.schedule.page_budget import Footprint
from tests.checkpoints import Pair
from tests.engine.conftest import CONTROLLED, lend, smc_llm
from tests.engine.test_engine import fingerprint, prompt, sound

ROWS, PAGE_SIZE, COUNT, LIMIT = 4, 4, 6, 32
PAGES = Footprint(ROWS, PAGE_SIZE, 1).worst_case(1, LIMIT)


@pytest.fixture(scope="module")
def by_use(pair: Pair, controlled: LLM) -> Iterator[LLM]:
    """`controlled` that admits by what groups use."""
    with smc_llm(pair, CONTROLLED, admission="optimistic") as by_use:
        yield by_use


Run = dict[int, tuple[RequestOutput, list[int], str]]


def params(number: int, control: float | None = None) -> SamplingParams:
    left = LIMIT - len(prompt(number)["prompt_token_ids"])
    return SamplingParams(
        seed=6 + number,
        max_tokens=left,
        temperature=0.6 + 0.1 * (number % 4),
        ignore_eos=number % 3 > 0,
        control=control,
        trace=True,
    )


def run(llm: LLM, numbers: list[int], pages: int = 4 * PAGES, controls: dict[int, float] | None = None) -> Run:
    """Outputs, streamed tokens and text, in so many pages; `controls` are requests' own, by their numbers."""
    engine, outputs = lend(llm, pages).engine, {}
    controls = controls or {}
    requests = {number: llm.request(prompt(number), params(number, controls.get(number))) for number in numbers}
    for request in requests.values():
        engine.add_request(request, stream=True)
    while engine.busy:
        for output in engine.step():
            outputs[output.request_id] = output
        sound(engine)
    result = {}
    for number, request in requests.items():
        chunks = engine.chunks(request.request_id)
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        result[number] = (outputs[request.request_id], tokens, "".join(chunk.text for chunk in chunks))
    return result


@pytest.fixture(scope="module")
def answers(by_use: LLM) -> list[Any]:
    done = run(by_use, list(range(COUNT)))
    for output, tokens, text in done.values():
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (tokens, text), "streamed is whole"
        assert output.metrics.preemptions == 0
    return [done[number][0] for number in range(COUNT)]


def test_rows_are_ragged_and_the_history_is_one(answers: list[Any]) -> None:
    """Particles of one cycle gain unequal numbers of tokens; lengths, ends and ancestors go together."""
    uneven = 0
    for output in answers:
        trace, before = output.smc.trace, np.ones(ROWS, int)
        was_finished = np.zeros(ROWS, bool)
        for ancestors, lengths, finished in zip(trace.ancestors, trace.lengths, trace.finished, strict=True):
            gained = lengths - before[ancestors]
            assert ((gained > 0) | was_finished[ancestors] | (before[ancestors] == 1)).all()
            assert (gained <= 4).all()
            uneven += len(set(gained[~finished])) > 1
            before, was_finished = lengths, finished
        assert before.tolist() == [len(particle.token_ids) for particle in output.smc.particles]
        assert was_finished.all()
    assert uneven > 3


# Requests with a control of their own.

OWN = {0: 0.1, 2: 1.0, 3: 0.1, 5: 0.0}


@pytest.fixture(scope="module")
def uncontrolled(pair: Pair, llm: LLM) -> Iterator[LLM]:
    """`llm` that admits by what groups use."""
    with smc_llm(pair, admission="optimistic") as uncontrolled:
        yield uncontrolled


def controlled_programs(llm: LLM) -> int:
    """Compiled decoding steps that can reject drafts."""
    executables = llm.engine.runner.programs
    return sum(key[-1] == "step" and key[0].ragged for key in executables)


@pytest.fixture(scope="module")
def own(uncontrolled: LLM) -> Run:
    """First without, so that the programs of others stay what they are; then with controls."""
    without = run(uncontrolled, list(range(COUNT)))
    assert controlled_programs(uncontrolled) == 0
    done = run(uncontrolled, list(range(COUNT)), controls=OWN)
    assert controlled_programs(uncontrolled) > 0
    for number in range(COUNT):
        same = fingerprint(done[number][0]) == fingerprint(without[number][0])
        assert same == (not OWN.get(number)), "0 is what the decoder does; others change the tokens"
    return done


def test_a_requests_own_control(own: Run, by_use: LLM, answers: list[Any]) -> None:
    """It is said, and decodes as a decoder's would, seed for seed."""
    for number, (output, tokens, text) in own.items():
        assert output.smc.control == OWN.get(number, 0.0)
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (tokens, text)
        if OWN.get(number) == 0.1:
            assert fingerprint(output) == fingerprint(answers[number])
    exact = own[2][0].smc
    assert exact.log_evidence == 0
    assert (exact.log_weights == 0).all()
    other = run(by_use, [2], controls=OWN)[2][0]
    assert (other.smc.control, other.smc.warning) == (1.0, None), "in place of the decoder's 0.1"
    assert fingerprint(other) == fingerprint(own[2][0])


def test_evidence_that_falls_is_told_of(uncontrolled: LLM, own: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Once a request; a control that keeps evidence up has nothing to tell."""
    with caplog.at_level(logging.WARNING, "smcjax"):
        done = run(uncontrolled, list(range(COUNT)))
    warnings = {number: output.smc.warning for number, (output, *_) in done.items() if output.smc.warning is not None}
    assert 0 < len(warnings) < COUNT
    for number, warning in warnings.items():
        assert "a control above 0 rejects such drafts" in warning
        assert done[number][0].smc.log_evidence < 0
    told = [record.getMessage().split(": ", 1)[1] for record in caplog.records]
    assert sorted(told) == sorted(f"{warning}." for warning in warnings.values())
    assert own[2][0].smc.warning is None, "at control 1"


def test_own_controls_in_any_mix(uncontrolled: LLM, own: Run) -> None:
    """In another order and in the pages of one request, where unequal rows take their worst case."""
    done = run(uncontrolled, list(range(COUNT))[::-1], PAGES, OWN)
    for number, (output, tokens, text) in done.items():
        assert fingerprint(output) == fingerprint(own[number][0])
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (tokens, text)
    assert sum(output.metrics.preemptions for output, *_ in done.values()) > 0


def test_who_refuses_a_control(plain: LLM, pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"^request 0: control is 0\.5 and decides what SMC rejects, but decoding is "):
        plain.generate("ab", SamplingParams(control=0.5))
    exact = SMC(n_particles=2, gamma=2, control=1.0)
    with LLM(pair.target, draft_model="ngram", decoding=exact, max_model_len=32) as llm:
        assert llm.request("ab", SamplingParams(control=1.0)).params.control == 1
        with pytest.raises(ValueError, match=r"^draft_model is .*SMC\(control=1\)"):
            llm.request("ab", SamplingParams(control=0.5))
