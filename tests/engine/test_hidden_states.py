"""Potentials of the target's hidden states through the engine: seeds, other requests, preemption, cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, SamplingParams, smc
from smcjax.smc.heads import HeadParams
from tests.checkpoints import Pair
from tests.engine.conftest import PIPELINED, lend, smc_llm
from tests.engine.test_stop_strings import fingerprint, generate

PROMPTS = ["a tale of two" + tail for tail in ("", " cities", "!", " cities")]


@pytest.fixture(scope="module")
def llm(pair: Pair, pipelined: LLM) -> Iterator[LLM]:
    """`pipelined` that admits by what groups use, in few pages."""
    with smc_llm(pair, PIPELINED, admission="optimistic") as llm:
        yield lend(llm, 45)


def head(size: int) -> smc.ValueHead:
    weight = np.random.default_rng(0).normal(size=(1, size))
    return smc.ValueHead(HeadParams(weight, np.zeros(1)))


def ask(number: int, *potentials: Any) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=20, ignore_eos=True, potentials=list(potentials))


@pytest.mark.slow
def test_seeds_preemption_and_cached_prefixes(llm: LLM) -> None:
    """Tokens are the seed's, whatever batch, pages and prefix cache are; a request without it has those of before."""
    steering = head(llm.models.target.hidden_size)
    params = [ask(number, *([steering] if number else [])) for number in range(4)]
    plain = [fingerprint(output) for output in generate(llm, PROMPTS, [ask(number) for number in range(4)])]
    llm.engine.reset()
    alone = [generate(llm, prompt, one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    assert max(output.metrics.num_cached_tokens for output in alone) > 0
    found = [fingerprint(output) for output in alone]
    assert found[0] == plain[0]
    assert all(steered != was for steered, was in zip(found[1:], plain[1:], strict=True)), "they steer"
    lend(llm, 45)
    together = generate(llm, PROMPTS, params)
    assert [fingerprint(output) for output in together] == found
    assert sum(output.metrics.preemptions for output in together) > 0


def test_another_models_potential_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"reads hidden states of 2 numbers and the target's have .*; use one that"):
        generate(llm, "ab", ask(0, head(size=2)))
