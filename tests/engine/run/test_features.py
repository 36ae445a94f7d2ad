"""Programs for what only some requests ask for: which a round takes, and what is said where one does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smcjax import SamplingParams
from smcjax.engine.requests.requests import Request
from smcjax.engine.run.features import ProgramVariants, features_now, features_of
from smcjax.engine.schedule.scheduler import Group, Reading, Schedule


@dataclasses.dataclass(frozen=True)
class Plain:
    """As much of a program as has features."""

    features: frozenset[str] = frozenset()


def group(**params: Any) -> Group:
    return Group(Request("0", None, [1, 2], SamplingParams(**params), 9, (), 0, 1), 0)


@pytest.mark.parametrize(
    ("params", "streams", "expected"),
    [
        ({}, True, set()),
        ({"temperature": 0, "min_tokens": 3, "stop": "a", "seed": 1, "trace": True}, True, set()),
        ({"top_k": 4}, False, {"truncation"}),
        ({"logit_bias": {}, "presence_penalty": 0, "repetition_penalty": 1}, False, set()),
        ({"logit_bias": {1: 0.5}}, False, {"adjustments"}),
        ({"repetition_penalty": 1.1}, False, {"adjustments"}),
        ({"logprobs": 0}, False, set()),
        ({"logprobs": 0}, True, {"logprobs"}),
        ({"logprobs": 1}, False, {"logprobs"}),
        ({"control": 0.1}, False, {"control"}),
        ({"control": 0.0}, False, set()),
        ({"prompt_logprobs": 0, "top_p": 0.5}, False, {"prompt_logprobs", "truncation"}),
    ],
)
def test_who_asks_for_what(params: dict[str, Any], streams: bool, expected: set[str]) -> None:
    request = group(**params).request
    assert features_of(request, streams=streams) == expected
    assert features_of(request, streams=streams, ragged=True) == expected - {"control"}


def test_prompts_are_scored_while_they_are_read() -> None:
    asking, other = group(prompt_logprobs=1, logprobs=2), group()
    asked = [features_of(one.request, streams=False) for one in (asking, other)]
    reading = {one: Schedule(2, prefill=[[Reading(whose, 0, 8)]]) for one, whose in ((0, asking), (1, other))}
    assert features_now(reading[0], asked) == {"logprobs", "prompt_logprobs"}
    assert features_now(reading[1], asked) == {"logprobs"}
    assert features_now(reading[1], []) == frozenset()


def test_what_does_not_fit_is_tried_once_and_named() -> None:
    compiled: list[tuple[list[int], Plain]] = []

    def compile_programs(sizes: list[int], program: Plain) -> None:
        compiled.append((sizes, program))
        if "logprobs" in program.features and sizes == [4]:
            raise ValueError("too large; lower max_num_seqs.")

    choice, plain = ProgramVariants(), Plain()
    three = frozenset({"logprobs", "adjustments", "truncation"})
    words = "top_k and top_p, penalties and logit_bias and logprobs cannot be used here: too large; lower max_num_seqs."
    assert choice.ready(plain, 2, three, compile_programs) == (Plain(three), None)
    for _ in range(2):
        assert choice.ready(plain, 4, three, compile_programs) == (plain, words)
    assert choice.ready(plain, 4, frozenset({"adjustments"}), compile_programs) == (
        Plain(frozenset({"adjustments"})),
        None,
    )
    assert choice.ready(plain, 4, frozenset(), compile_programs) == (plain, None)
    assert [program for sizes, program in compiled if sizes == [4]].count(Plain(three)) == 1
