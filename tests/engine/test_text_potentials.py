"""Text potentials through the engine: the law, seeds whatever the host's speed, failures, and other requests' peace."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
import re
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from smcjax import LLM, RequestOutput, SamplingParams, TextPotential, smc
from smcjax.engine.engine import Engine
from smcjax.engine.results.steering import Scorer, Steering
from smcjax.engine.schedule.scheduler import Schedule
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm
from tests.engine.test_stop_strings import fingerprint

VOWELS = set("aeiou")


def vowels(prompt: str, texts: Sequence[str]) -> list[float]:
    """e^0.5 a vowel."""
    return [0.5 * sum(letter in VOWELS for letter in text) for text in texts]


def early(prompt: str, texts: Sequence[str]) -> list[float]:
    """Values of beginnings are something else, which the whole answer takes back."""
    return [2.5 - 0.3 * len(text) + 0.6 * text.count("b") for text in texts]


def slowly(function: Any, seconds: float = 0.02, seed: int = 0) -> Any:
    """The function after random times, so that answers come late and out of order."""
    rng = random.Random(seed)

    def slow(prompt: str, texts: list[str]) -> list[float]:
        time.sleep(seconds * rng.random())
        return function(prompt, texts)

    return slow


STEERED = TextPotential(vowels, ask=3, complete=vowels)


def ask(number: int, *potentials: Any, **changes: Any) -> SamplingParams:
    fields = {"seed": number, "max_tokens": 14 + number % 5, "ignore_eos": number % 2 == 0, **changes}
    return SamplingParams(potentials=potentials, **fields)


def generate(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def steered(llm: LLM) -> LLM:
    return llm


PROMPTS = ["ab" + "c" * number for number in range(4)]


def weights_of(output: RequestOutput) -> Any:
    assert output.smc is not None
    return output.smc.log_weights.tolist(), output.smc.log_evidence


def test_the_same_however_fast_the_host_is(steered: LLM) -> None:
    """Functions fast and slow, results read at once or a cycle late, alone, in a mix, streamed: the same tokens."""
    quick = [ask(i, TextPotential(early, ask=2, complete=vowels)) for i in range(4)]
    slow = [ask(i, TextPotential(slowly(early, seed=i), ask=2, complete=slowly(vowels))) for i in range(4)]
    alone = [generate(steered, prompt, one)[0] for prompt, one in zip(PROMPTS, quick, strict=True)]
    wanted = [(fingerprint(output), weights_of(output)) for output in alone]
    unsteered = [fingerprint(generate(steered, p, ask(i))[0]) for i, p in enumerate(PROMPTS)]
    assert [one for one, _ in wanted] != unsteered, "it steers at all"
    for params, lag in ((slow, 0), (slow, 1), (quick, 1)):
        with mock.patch.object(steered.engine, "_lag", lag):
            outputs = generate(steered, PROMPTS, params)
            assert [(fingerprint(output), weights_of(output)) for output in outputs] == wanted
    chunks = list(steered.generate_stream(PROMPTS[1], slow[1]))
    assert "".join(chunk.text for chunk in chunks) == alone[1].outputs[0].text
    assert chunks[-1].output is not None
    assert fingerprint(chunks[-1].output) == wanted[1][0]


@pytest.mark.parametrize("busy", [True, False])
def test_values_are_awaited_while_the_device_is_busy(steered: LLM, busy: bool) -> None:
    """Then no cycle begins without a group that could have been in it; else groups wait, and nothing is awaited."""
    waited, enqueue = [], Engine._enqueue

    def spy(engine: Engine, schedule: Schedule) -> None:
        waited.extend(running.group.waits for running in engine._steered)
        enqueue(engine, schedule)

    with (
        mock.patch.object(steered.engine, "_lag", 1),
        mock.patch.object(Engine, "_busy", busy),
        mock.patch.object(Engine, "_enqueue", spy),
    ):
        generate(steered, PROMPTS, [ask(i, TextPotential(slowly(early, seed=i), ask=2)) for i in range(4)])
    assert waited
    assert any(waited) is not busy


def test_a_wait_for_a_slow_function_does_not_spin() -> None:
    """One that returned before ends a wait once; the next wait is for the other, and ends as soon as that returns."""
    release = threading.Event()

    def stuck(prompt: str, texts: list[str]) -> list[float]:
        release.wait(60)
        return [0.0] * len(texts)

    scorer = Scorer()
    quick = scorer.ask(TextPotential(early), "", ["a"], whole=True)
    slow = scorer.ask(TextPotential(stuck), "", ["a"], whole=True)
    scorer.wait(60)
    assert quick.done()
    began = time.monotonic()
    scorer.wait(0.2)
    assert time.monotonic() - began > 0.1
    assert not slow.done()
    release.set()
    scorer.wait(60)
    assert slow.result() == [0.0]
    assert time.monotonic() - began < 30


def test_a_slow_function_keeps_nobody_else_waiting(steered: LLM) -> None:
    """Others end while it has not returned; an abort ends it at once."""
    release = threading.Event()

    def stuck(prompt: str, texts: list[str]) -> list[float]:
        release.wait(60)
        return [0.0] * len(texts)

    try:
        engine = steered.engine
        request = steered.request("ab", ask(1, TextPotential(stuck, ask=1)))
        with steered._turn:
            engine.add_request(request)
        assert generate(steered, PROMPTS, [ask(i) for i in range(4)])[0].error is None
        assert engine.holds(request.request_id)
        with steered._turn:
            engine.abort(request.request_id)
            (output,) = [one for _ in range(3) for one in engine.step()]
        assert output.outputs[0].finish_reason == "abort"
        at_the_end = steered.request("ab", ask(1, TextPotential(stuck)))
        with steered._turn:
            engine.add_request(at_the_end)
            while not engine._scoring:
                assert engine.step() == []
            engine.abort(at_the_end.request_id)
            (output,) = engine.step()
            assert output.outputs[0].finish_reason == "abort"
            assert not engine.busy
    finally:
        release.set()


FAILURES: list[tuple[Any, str]] = [
    (lambda prompt, texts: 1 / 0, "ZeroDivisionError: division by zero"),
    (lambda prompt, texts: [0.0] * (len(texts) + 1), "values for"),
    (lambda prompt, texts: "abc", "return a list of numbers"),
    (lambda prompt, texts: None, "it returned None; return a list of numbers"),
    (lambda prompt, texts: [math.nan] * len(texts), "it gave nan for"),
    (lambda prompt, texts: [math.inf] * len(texts), "it gave inf for"),
]


def test_a_failure_ends_its_request_alone_in_a_sentence(steered: LLM) -> None:
    """The function that fails values beginnings, or whole answers alone."""
    params = ask(0, STEERED, ignore_eos=True)
    alone = generate(steered, PROMPTS[0], params)[0]
    for function, words in FAILURES:
        broken = (TextPotential(function, ask=2), TextPotential(vowels, 2, function))
        good, *bad = generate(
            steered, PROMPTS[:3], [params, *(ask(1, potential, ignore_eos=True) for potential in broken)]
        )
        assert good.error is None
        assert (fingerprint(good), weights_of(good)) == (fingerprint(alone), weights_of(alone))
        for output in bad:
            assert re.fullmatch(rf"the potential .*{re.escape(words)}.*\.", output.error)
            assert output.outputs[0].finish_reason == "error"


def test_answers_that_are_worth_nothing_are_not_given(steered: LLM) -> None:
    """−inf for texts with a letter: no particle with weight has it; −inf for all: a sentence."""
    banned = TextPotential(lambda prompt, texts: [-math.inf if "e" in text else 0.0 for text in texts], ask=1)
    for seed in range(6):
        output = generate(steered, "ab", ask(seed, banned))[0]
        assert output.smc is not None
        if output.error is None:
            assert all("e" not in one.text for one in output.smc.particles if one.weight > 0)
    none = TextPotential(lambda prompt, texts: [-math.inf] * len(texts))
    for ask_ in (None, 1):
        output = generate(steered, "ab", ask(1, dataclasses.replace(none, ask=ask_), ignore_eos=True))[0]
        assert output.error is not None
        assert "no particle has a usable weight left" in output.error
        assert "potential" in output.error


class Recorder:
    """Says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __call__(self, prompt: str, texts: list[str]) -> list[float]:
        self.asked += [(prompt, text) for text in texts]
        return [0.1 * len(text) for text in texts]


def test_a_text_is_asked_once_with_its_prompt(steered: LLM) -> None:
    """Copies of a row ask for nothing again; what is asked are beginnings of answers, then whole ones."""
    on_the_way, whole = Recorder(), Recorder()
    output = generate(steered, "abc", ask(3, TextPotential(on_the_way, ask=4, complete=whole), ignore_eos=True))[0]
    assert output.smc is not None
    assert len(set(on_the_way.asked)) == len(on_the_way.asked) > 4
    assert {len(text) % 4 for _, text in on_the_way.asked} <= {0, 3}, "a token is a letter, or an EOS without text"
    assert {prompt for prompt, _ in on_the_way.asked} == {"abc"}
    assert {text for _, text in whole.asked} == {one.text for one in output.smc.particles}


def test_a_regular_expression_says_where(steered: LLM) -> None:
    asked = Recorder()
    generate(steered, "abc", ask(4, TextPotential(asked, ask="[aeiou]", complete=vowels), ignore_eos=True))
    assert asked.asked
    assert all(text[-1] in VOWELS for _, text in asked.asked)


def test_preemption_asks_for_nothing_twice(steered: LLM) -> None:
    """And changes no token. Negative control: a follower that begins with no known values asks again."""
    asked = Recorder()
    params = [ask(i, TextPotential(asked, ask=2), max_tokens=20, ignore_eos=True) for i in range(3)]
    wanted = [fingerprint(generate(steered, PROMPTS[i], one)[0]) for i, one in enumerate(params)]
    begun: list[Steering] = []

    def run(again: Any) -> int:
        """How often a text is asked about at most, when one request is preempted and goes on by `again`."""
        begun.clear()
        asked.asked.clear()
        with mock.patch.object(Steering, "again", lambda one: begun.append(one) or again(one)), steered._turn:
            engine = steered.engine
            requests = [steered.request(PROMPTS[i], one) for i, one in enumerate(params)]
            outputs: list[RequestOutput] = []
            for request in requests:
                engine.add_request(request)
            for _ in range(3):
                outputs += engine.step()
            now = Schedule(engine._scheduler._size, preempted=[engine._scheduler._preempt()])
            with mock.patch.object(engine._scheduler, "schedule", return_value=now):
                outputs += engine.step()
            while engine.busy:
                outputs += engine.step()
        assert begun, "one began again"
        by_id = {output.request_id: output for output in outputs}
        assert [fingerprint(by_id[request.request_id]) for request in requests] == wanted
        return max(collections.Counter(asked.asked).values())

    assert run(Steering.again) == 1
    assert run(lambda one: Steering(one._request, one._tokenizer, one._scorer)) == 2


async def _coroutine(prompt: str, texts: list[str]) -> list[float]:
    import asyncio

    await asyncio.sleep(0)
    return vowels(prompt, texts)


def test_ways_to_say_the_same(steered: LLM) -> None:
    """A coroutine function, a product of roots, and a function: one law, so one answer."""
    forms = [
        (STEERED,),
        (dataclasses.replace(STEERED, score=_coroutine, complete=_coroutine),),
        (dataclasses.replace(STEERED, exponent=0.25), dataclasses.replace(STEERED, exponent=0.75)),
    ]
    found = [generate(steered, "ab", ask(7, *potentials))[0] for potentials in forms]
    assert fingerprint(found[0]) == fingerprint(found[1]) == fingerprint(found[2])
    np.testing.assert_allclose([weights_of(one)[1] for one in found], weights_of(found[0])[1], atol=1e-4)


def test_stop_strings_cut_what_is_asked(steered: LLM) -> None:
    asked = Recorder()
    output = generate(steered, "ab", ask(2, TextPotential(asked, ask=1), stop=["i", "o"], ignore_eos=True))[0]
    assert output.error is None
    assert not [text for _, text in asked.asked if "i" in text or "o" in text]


@pytest.mark.slow
def test_potentials_of_tokens_are_a_requests_own(pair: Pair, steered: LLM) -> None:
    """As the decoder's own potentials, and without effect on others in the batch."""
    favour = smc.TokenPotential(((73, 2.0), (86, -2.0), (68, -1.5)))
    plain = fingerprint(generate(steered, "ab", ask(3, ignore_eos=True))[0])
    own, beside, both = generate(
        steered,
        ["ab"] * 3,
        [ask(3, favour, ignore_eos=True), ask(3, ignore_eos=True), ask(3, favour, STEERED, ignore_eos=True)],
    )
    assert fingerprint(beside) == plain
    assert fingerprint(own) != plain
    assert both.error is None
    with smc_llm(pair, {"potentials": (favour,)}, max_num_seqs=1) as llm:
        decoders = generate(llm, "ab", ask(3, ignore_eos=True))[0]
    assert fingerprint(own) == fingerprint(decoders)
    np.testing.assert_allclose(weights_of(own)[1], weights_of(decoders)[1], atol=1e-5)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (TextPotential, {"score": 3}, "score must be a function"),
    (
        TextPotential,
        {"score": vowels, "ask": 0},
        "ask must be a number of tokens, a regular expression, or None, got",
    ),
    (TextPotential, {"score": vowels, "ask": "("}, "ask must be a regular expression, got"),
    (TextPotential, {"score": vowels, "ask": "a*"}, "which matches where nothing is"),
    (TextPotential, {"score": vowels, "exponent": -1.0}, "exponent must be a number from 0 to 1,000,000, got"),
    (TextPotential, {"score": vowels, "complete": 3}, "complete must be a function"),
    (SamplingParams, {"potentials": [3]}, "potentials must be a list of TextPotentials or smcjax.smc.Potentials, got"),
    (SamplingParams, {"potentials": STEERED}, "potentials must be a list of"),
    (SamplingParams, {"potentials": [smc.ConstantPotential]}, "potentials must be a list of"),
    *(
        (smc.TokenPotential, {"log_factors": factors}, "log_factors must be pairs of a token id and a number, as")
        for factors in (((-1, 1.0),), ((13, math.nan),))  # of the right types, which tests check by themselves
    ),
    (SamplingParams, {"potentials": [smc.ConstantPotential(1.0)] * 2}, "a potential on the device twice"),
]


def test_wrong_potentials_are_refused(plain: LLM, steered: LLM) -> None:
    for kind, fields, words in REFUSED:
        with pytest.raises(ValueError, match=re.escape(words) + r".*\.$"):
            kind(**fields)
    with pytest.raises(ValueError, match="potentials weigh a population, but decoding is autoregressive"):
        generate(plain, "ab", ask(1, STEERED))
    with pytest.raises(ValueError, match="stop strings cut answers behind which potentials of tokens have looked"):
        generate(steered, "ab", ask(1, smc.ConstantPotential(1.0), stop="a"))


# The law.

REQUESTS = 480
FIELDS: dict[str, Any] = {"max_tokens": 7, "ignore_eos": False}
FORM = "[b-df-z]*"  # of every other request: without two of the vowels that the potential values


def category(text: str) -> int:
    return min(sum(letter in VOWELS for letter in text), 2)


def shares(outputs: Sequence[RequestOutput], weights: Sequence[float]) -> list[tuple[float, float]]:
    """For each category the mean of weight·1(answer in it), and its standard error."""
    found = []
    for name in range(3):
        each = np.array(
            [w * (category(o.outputs[0].text) == name) for o, w in zip(outputs, weights, strict=True)], np.float64
        )
        found.append((float(each.mean()), float(each.std() / math.sqrt(len(each)))))
    return found


def doubled(steering: Steering, population: Any, *, select: str) -> Any:
    """Planted: the last value is added to what the weight has of beginnings."""
    forgotten = dataclasses.replace(population, log_text_potential=np.zeros_like(population.log_text_potential))
    return _final(steering, forgotten, select=select)


_final = Steering.final


@pytest.mark.slow
def test_the_law_of_the_answer(pair: Pair, crowd: LLM) -> None:
    """E[Ẑ·1(answer = x)] is p(x)·Φ(x)·1(x has the request's form), of texts by their vowels.

    Functions answer late and out of order, and every other request has a form. Against the target alone, whose answers
    weigh Φ, and nothing without the form. The control does not take back what beginnings were worth.
    """
    params = [SamplingParams(seed=10**6 + number, **FIELDS) for number in range(2 * REQUESTS)]
    alone = generate(crowd, ["ab"] * len(params), params)
    texts = [output.outputs[0].text for output in alone]
    values = [math.exp(value) for value in vowels("", texts)]
    formed = [value * bool(re.fullmatch(FORM, text)) for value, text in zip(values, texts, strict=True)]
    wanted = shares(alone, values) + shares(alone, formed)
    same = Pair(pair.target, pair.target)  # the draft differs by its temperature, so that no weight is extreme
    config = {"n_particles": 3, "gamma": 1, "trace": False, "draft_temperature": 1.25, "ess_threshold": 0.9}
    potential = TextPotential(slowly(early, 0.002), ask=1, complete=slowly(vowels, 0.002))
    forms = None, {"type": "regex", "regex": FORM}
    params = [
        SamplingParams(seed=number, potentials=[potential], response_format=forms[number % 2], **FIELDS)
        for number in range(REQUESTS)
    ]
    with smc_llm(same, config, max_num_seqs=64) as llm:
        scores = []
        for final in (_final, doubled):
            with mock.patch.object(Steering, "final", final):
                outputs = generate(llm, ["ab"] * REQUESTS, params)
            assert any(output.metrics.resamples for output in outputs)
            assert all(re.fullmatch(FORM, output.outputs[0].text) for output in outputs[1::2])
            found = []
            for some in (outputs[::2], outputs[1::2]):
                found += shares(some, [math.exp(output.smc.log_evidence) for output in some if output.smc])
            scores.append([abs(f[0] - w[0]) / math.hypot(f[1], w[1]) for f, w in zip(found, wanted, strict=True)])
    right, wrong = scores
    assert max(right) < 4, scores
    assert min(max(wrong[:3]), max(wrong[3:])) > 8, scores
