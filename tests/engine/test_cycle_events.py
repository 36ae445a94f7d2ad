"""Cycles as they happen: the events that a reader sees make up the trace, and play back to the final population."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, SamplingParams, StreamChunk
from smcjax.engine.results.outputs import Cycle, RequestOutput
from smcjax.engine.schedule.scheduler import Schedule
from tests.engine.test_engine import drain

PARAMS = SamplingParams(seed=4, max_tokens=30, trace=True)
LONG = dataclasses.replace(PARAMS, ignore_eos=True)
OF_TRACE = ("ess", "resampled", "ancestors", "log_weights", "lengths", "finished", "tokens", "log_evidences")


@pytest.fixture(scope="module")
def untraced(controlled: LLM) -> LLM:
    """Its decoder keeps no traces unless a request asks; rows have unequal lengths."""
    return controlled


def events_of(chunks: Sequence[StreamChunk]) -> list[Cycle]:
    return [chunk.cycle for chunk in chunks if chunk.cycle is not None]


def rows_of(events: Sequence[Cycle]) -> list[list[int]]:
    """The particles' tokens, by nothing but events."""
    rows = [list(tokens) for tokens in events[0].blocks]
    for event in events[1:]:
        grown = [row + block for row, block in zip(rows, event.blocks, strict=True)]
        rows = [list(grown[ancestor]) for ancestor in event.ancestors]
        assert [len(row) for row in rows] == event.lengths.tolist()
    return rows


def check(events: Sequence[Cycle], output: RequestOutput) -> None:
    """The laws: one event a cycle, in order; replayed they are the trace and the population, bit by bit."""
    smc = output.smc
    assert smc is not None
    assert smc.trace is not None
    assert [event.index for event in events] == list(range(output.metrics.cycles + 1))
    assert (events[0].ess, events[0].log_weights, events[0].log_evidence) == (None, None, None)
    for name in OF_TRACE:
        replayed = [
            getattr(event, {"log_evidences": "log_evidence", "tokens": "blocks"}.get(name, name))
            for event in events[1:]
        ]
        kept = getattr(smc.trace, name)
        assert len(replayed) == len(kept)
        for one, other in zip(replayed, kept, strict=True):
            np.testing.assert_array_equal(np.asarray(one, object), np.asarray(other, object))
    assert rows_of(events) == [particle.token_ids for particle in smc.particles]
    assert events[-1].log_evidence == pytest.approx(smc.log_evidence, abs=1e-4)
    for event in events[1:]:
        weights = np.exp(event.log_weights - event.log_weights.max())
        assert event.ess == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), rel=1e-4)


def test_events_replayed_are_the_trace(untraced: LLM) -> None:
    resampled = 0
    for seed in range(3):
        params = dataclasses.replace(PARAMS, seed=seed)
        chunks = list(untraced.generate_stream("ab", params))
        output = chunks[-1].output
        assert output is not None
        check(events_of(chunks), output)
        resampled += sum(event.resampled for event in events_of(chunks))
        assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
        whole = untraced.generate("ab", params, use_tqdm=False)[0]
        assert whole.outputs == output.outputs
        assert whole.smc is not None
        assert whole.smc.trace is not None
        np.testing.assert_array_equal(whole.smc.trace.log_weights, output.smc.trace.log_weights)
    assert resampled > 2
    events = events_of(chunks)
    mistaken = [dataclasses.replace(event, ancestors=np.roll(event.ancestors, 1)) for event in events]
    with pytest.raises(AssertionError):
        check(mistaken, output)  # control


def test_events_come_while_the_request_runs(untraced: LLM) -> None:
    """Each with the step that reads its cycle, whether or not any text has become certain."""
    request = untraced.request("ab", PARAMS)
    engine = untraced.engine
    engine.add_request(request, stream=True)
    seen: list[int] = []
    while engine.busy:
        engine.step()
        got = events_of(engine.chunks(request.request_id))
        assert len(got) <= 2
        seen.append(len(got))
    assert sum(map(bool, seen)) >= len(seen) - 2
    engine.forget(request.request_id)


def test_nobody_else_gets_events(untraced: LLM) -> None:
    plain = dataclasses.replace(PARAMS, trace=False)
    engine, outputs = untraced.engine, dict[str, Any]()
    requests = [untraced.request("ab", one) for one in (PARAMS, plain)]
    for request in requests:
        engine.add_request(request, stream=True)
    outputs = drain(engine)
    observed, other = (engine.chunks(request.request_id) for request in requests)
    check(events_of(observed), outputs[requests[0].request_id])
    assert events_of(other) == []
    assert outputs[requests[1].request_id].smc.trace is None
    assert outputs[requests[0].request_id].outputs == outputs[requests[1].request_id].outputs


@pytest.mark.parametrize("lag", [0, 1])
def test_what_is_under_way_at_an_abort_is_told_as_well(untraced: LLM, lag: int) -> None:
    engine, before = untraced.engine, untraced.engine._lag
    engine._lag = lag
    try:
        request = untraced.request("ab", LONG)
        engine.add_request(request, stream=True)
        for _ in range(4):
            engine.step()
        engine.abort(request.request_id)
        output = drain(engine)[request.request_id]
        assert output.outputs[0].finish_reason == "abort"
        check(events_of(engine.chunks(request.request_id)), output)
    finally:
        engine._lag = before


@pytest.mark.slow
def test_who_begins_again_is_told_of_no_cycle_twice(untraced: LLM) -> None:
    """A preempted request goes through the same cycles once more; its reader goes on where it was."""
    engine = untraced.engine
    asked = dataclasses.replace(LONG, logprobs=2, prompt_logprobs=1)
    expected = list(untraced.generate_stream("ab", asked))
    request = untraced.request("ab", asked)
    engine.add_request(request, stream=True)
    for _ in range(4):
        engine.step()
    scheduler = engine._scheduler
    schedule, preempt = scheduler.schedule, scheduler._preempt

    def preempting(_: object) -> Schedule:
        scheduler.schedule = schedule
        return Schedule(scheduler._size, preempted=[preempt()])

    scheduler.schedule = preempting
    output = drain(engine)[request.request_id]
    chunks = engine.chunks(request.request_id)
    assert output.metrics.preemptions == 1
    check(events_of(chunks), output)
    assert sum(chunk.prompt_logprobs is not None for chunk in chunks) == 1
    said = [token for chunk in chunks for token in chunk.token_ids]
    scores = [logprob for chunk in chunks for logprob in chunk.logprobs or []]
    assert said == expected[-1].output.outputs[0].token_ids
    np.testing.assert_allclose(scores, expected[-1].output.outputs[0].logprobs, atol=1e-5)
    assert output.outputs[0].top_logprobs == expected[-1].output.outputs[0].top_logprobs


def test_exact_decoders_have_no_weights_to_tell(plain: LLM) -> None:
    chunks = list(plain.generate_stream("ab", LONG))
    events = events_of(chunks)
    assert rows_of(events) == [chunks[-1].output.outputs[0].token_ids]
    assert {(event.ess, event.log_weights, event.log_evidence, event.resampled) for event in events} == {
        (None, None, None, False)
    }
