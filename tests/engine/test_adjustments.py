"""Penalties and logit_bias through the engine: by the text so far, each request by its own, refused by name for SMC."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, RequestOutput, SamplingParams
from tests.engine.test_engine import drain
from tests.engine.test_logprobs import dense, log_softmax

PROMPT: dict[str, Any] = {"prompt_token_ids": [97, 98, 97, 99]}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
CHANGES: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0, "repetition_penalty": 1.5},
    {"repetition_penalty": 3.0},
    {"logit_bias": {100: 4.0, 101: -100}, "frequency_penalty": -0.5},
]


def adjusted(llm: LLM, output: RequestOutput, params: SamplingParams) -> np.ndarray:
    """The logits [T, V] that each token of the answer was chosen from, by the text before it."""
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    rows = dense(llm, prompt + answer)[len(prompt) - 1 : -1]
    for place, row in enumerate(rows):
        counts = Counter(answer[:place])
        for token, value in (params.logit_bias or {}).items():
            row[token] += value
        for token in {*prompt, *counts}:
            row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
        for token, count in counts.items():
            row[token] -= params.frequency_penalty * count + params.presence_penalty
    return rows


@pytest.mark.slow
def test_greedy_tokens_are_those_of_the_adjusted_logits(plain: LLM, rejecting: LLM) -> None:
    """Four requests at once, each with its own; drafts that repeat within a block are seen as repeating."""
    params = [dataclasses.replace(GREEDY, **change) for change in CHANGES]
    for llm in (plain, rejecting):
        outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
        for output, one in zip(outputs, params, strict=True):
            logits, answer = adjusted(llm, output, one), output.outputs[0]
            assert answer.token_ids == logits.argmax(-1).tolist()
            own = np.take_along_axis(log_softmax(logits), np.array(answer.token_ids)[:, None], axis=1)[:, 0]
            np.testing.assert_allclose(answer.logprobs or [], own, atol=1e-4)
            assert adjusted(llm, output, GREEDY).argmax(-1).tolist() != answer.token_ids, "control"


@pytest.mark.slow
def test_neighbours_and_lanes_change_nothing(rejecting: LLM) -> None:
    """Requests with and without come and go one by one, through batches of every size."""
    sampled = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)
    asked = [dataclasses.replace(sampled, seed=i, **change) for i, change in enumerate([*CHANGES, {}, {}])]
    alone = [rejecting.generate(PROMPT, one, use_tqdm=False)[0].outputs[0].token_ids for one in asked]
    assert alone[5] != rejecting.generate(PROMPT, dataclasses.replace(asked[5], **CHANGES[0]))[0].outputs[0].token_ids
    engine = rejecting.engine
    for order in ([0, 4, 1, 5, 2, 3], [5, 3, 4, 2, 1, 0]):
        names, outputs = {}, dict[str, RequestOutput]()
        for number in order:
            request = rejecting.request(PROMPT, asked[number])
            engine.add_request(request)
            names[request.request_id] = number
            outputs |= {output.request_id: output for output in engine.step()}
        outputs |= drain(engine)
        assert {names[name]: output.outputs[0].token_ids for name, output in outputs.items()} == dict(enumerate(alone))


def test_a_bias_forces_and_forbids(plain: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    forced = plain.generate(PROMPT, dataclasses.replace(params, logit_bias={7: 100}), use_tqdm=False)[0]
    assert forced.outputs[0].token_ids == [7] * 6
    usual = plain.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids
    banned = dataclasses.replace(params, logit_bias=dict.fromkeys(usual, -100))
    assert not set(usual) & set(plain.generate(PROMPT, banned, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("change", [*CHANGES[:1], {"presence_penalty": 1}, *CHANGES[2:3], {"logit_bias": {1: 1}}])
def test_smc_refuses_by_name(llm: LLM, change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=rf"^request 0: {name} is .* use decoding=Rejection\(\) or Autoregressive\(\)"):
        llm.generate(PROMPT, SamplingParams(max_tokens=2, **change))
    llm.generate(PROMPT, SamplingParams(max_tokens=2, presence_penalty=0, logit_bias={}), use_tqdm=False)


def test_biases_that_no_model_has(plain: LLM) -> None:
    with pytest.raises(ValueError, match="logit_bias has 1025 entries, and 1024 are the most"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(ValueError, match="request 0: logit_bias holds 272; ids of this model are 0 to 271"):
        plain.generate(PROMPT, SamplingParams(logit_bias={3: 1, 272: 1}))
    mine = {3: 1.0}
    params = SamplingParams(logit_bias=mine)
    mine[4] = 1000.0
    assert params.logit_bias == {3: 1.0}
