"""Pipelined SMC through the engine: any mix of requests, streamed, preempted; what is reported and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, SMC, SamplingParams
from smcjax.smc import KeepAll
from tests.checkpoints import Pair
from tests.engine.conftest import PIPELINED, smc_llm
from tests.engine.test_control import COUNT, PAGES, ROWS, run
from tests.engine.test_eagle import TARGET
from tests.engine.test_engine import fingerprint
from tests.model.test_eagle import HEAD

FORM = {"type": "regex", "regex": "(ab|c){4,}"}


@pytest.fixture(scope="module")
def by_use(pair: Pair, pipelined: LLM) -> Iterator[LLM]:
    """`pipelined` that admits by what groups use."""
    with smc_llm(pair, PIPELINED, admission="optimistic") as by_use:
        yield by_use


@pytest.fixture(scope="module")
def answers(by_use: LLM) -> list[Any]:
    done = run(by_use, list(range(COUNT)))
    for output, tokens, text in done.values():
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (tokens, text), "streamed is whole"
    return [done[number][0] for number in range(COUNT)]


def test_cycles_give_whole_blocks_but_the_first(answers: list[Any]) -> None:
    resamples = 0
    for output in answers:
        trace, before, done = output.smc.trace, np.ones(ROWS, int), np.zeros(ROWS, bool)
        for cycle, (ancestors, lengths, finished) in enumerate(
            zip(trace.ancestors, trace.lengths, trace.finished, strict=True)
        ):
            gained = lengths - before[ancestors]
            assert (gained[~finished] == (3 if cycle else 0)).all()
            assert not gained[done[ancestors]].any()
            before, done = lengths, finished
        assert done.all()
        resamples += output.metrics.resamples
    assert resamples > 0


def test_a_warning_says_what_can_be_done(answers: list[Any]) -> None:
    """A pipelined decoder has no control to raise."""
    warnings = [output.smc.warning for output in answers if output.smc.warning is not None]
    assert warnings
    for warning in warnings:
        assert warning.endswith(
            "more particles follow it closer, and a control, without pipelined, rejects such drafts"
        )


def test_few_pages_and_another_order_change_nothing(by_use: LLM, answers: list[Any]) -> None:
    done = run(by_use, list(range(COUNT))[::-1], PAGES)
    for number, answer in enumerate(answers):
        output, tokens, text = done[number]
        assert fingerprint(output) == fingerprint(answer)
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (tokens, text)
    assert sum(output.metrics.preemptions for output, *_ in done.values()) > 0


@pytest.mark.slow
def test_log_probabilities_and_forms(pipelined: LLM) -> None:
    """Log p_T of each token is the target's, also within a form."""
    asked = SamplingParams(seed=3, max_tokens=12, logprobs=2, response_format=FORM)
    (output,) = pipelined.generate(["ab"], asked, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.text.replace("ab", "").strip("c") == ""
    assert len(answer.logprobs) == len(answer.token_ids) == len(answer.top_logprobs) > 3
    whole = {"prompt_token_ids": [*output.prompt_token_ids, *answer.token_ids]}
    (read,) = pipelined.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    np.testing.assert_allclose(answer.logprobs, read.prompt_logprobs[-len(answer.token_ids) :], atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"control": 0.1}, r"pipelined is True and control 0\.1, which decides about drafts"),
        ({"control": KeepAll()}, r"pipelined is True and control KeepAll\(\), which decides about drafts"),
        ({"pipelined": 1}, "pipelined must be True or False, got 1"),
    ],
)
def test_options_that_do_not_go_together(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SMC(**{"pipelined": True, **arguments})


def test_what_pipelined_means_goes_with_it() -> None:
    """Without it a decoder is the usual one again, under the usual control; a control that was given is kept."""
    piped = SMC(2, 3, pipelined=True)
    usual = dataclasses.replace(piped, pipelined=False)
    assert (usual.control, piped.control) == (0.1, 0)
    assert usual == SMC(2, 3) == SMC(2, 3, control=0.1)
    assert hash(usual) == hash(SMC(2, 3, control=0.1))
    assert dataclasses.replace(usual, pipelined=True, n_particles=2) == piped == SMC(2, 3, control=0, pipelined=True)
    assert dataclasses.replace(SMC(2, 3, control=0, pipelined=True), pipelined=False).control == 0
    with pytest.raises(ValueError, match=r"pipelined is True and control 0\.1, which decides about drafts"):
        dataclasses.replace(SMC(2, 3, control=0.1), pipelined=True)
    assert usual.speculation.bonus
    assert usual.speculation.defers
    assert (usual.tokens_per_cycle, piped.tokens_per_cycle) == (4, 3)
    assert (piped.speculation.bonus, piped.speculation.defers) == (False, False)


def test_requests_and_models_that_are_refused(pipelined: LLM) -> None:
    with pytest.raises(ValueError, match=r"control is 0\.1 and the decoder pipelined, which cannot reject"):
        pipelined.generate(["ab"], SamplingParams(control=0.1))
    with pytest.raises(ValueError, match=r"pipelined is True and draft_model is .*EAGLE.*; use pipelined=False"):
        LLM(TARGET, draft_model=HEAD, decoding=SMC(2, 2, pipelined=True))
