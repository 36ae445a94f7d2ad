"""The population behind an answer: weights, evidence, genealogy, counters."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from smcjax import LLM, RequestOutput, SamplingParams
from smcjax.smc import effective_sample_size
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm
from tests.lazily import Later

pytestmark = pytest.mark.compiled_at_once

N = 4


@pytest.fixture(scope="module")
def powered(pair: Pair) -> Iterator[LLM]:
    """α ≠ 1, so that x₀ and every bonus token weigh something; never the draft's own temperature."""
    with smc_llm(pair, {"power": 2.0, "draft_temperature": 0.8, "ess_threshold": 0.7}, max_num_seqs=2) as llm:
        yield llm


def outputs_of(llm: LLM) -> list[RequestOutput]:
    params = [SamplingParams(seed=s, max_tokens=30, temperature=0.9, ignore_eos=s % 2 == 0) for s in range(6)]
    return llm.generate(["ab", "c", "hello", "q", "xyz", "the"], params, use_tqdm=False)


@pytest.fixture(scope="module", params=["power 1", "power 2"])
def outputs(request: pytest.FixtureRequest, llm: LLM, powered: LLM) -> list[RequestOutput]:
    return outputs_of(llm if request.param == "power 1" else powered)


def test_shapes_and_the_answer_is_the_selected_particle(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        smc, answer = output.smc, output.outputs[0]
        assert smc is not None
        assert smc.trace is not None
        chosen = smc.particles[smc.selected]
        assert (chosen.token_ids, chosen.finish_reason) == (answer.token_ids, answer.finish_reason)
        assert smc.trace.selected == smc.selected
        assert [p.log_weight for p in smc.particles] == smc.log_weights.tolist()
        cycles = output.metrics.cycles
        assert smc.log_weights.shape == (N,)
        assert smc.trace.ess.shape == smc.trace.resampled.shape == (cycles,)
        assert smc.trace.ancestors.shape == smc.trace.log_weights.shape == smc.trace.lengths.shape == (cycles, N)
        assert smc.trace.texts is not None
        assert smc.trace.texts[smc.selected] == answer.text
        assert all(p.finish_reason in ("stop", "length") for p in smc.particles)


def test_the_trace_tells_one_story(outputs: list[RequestOutput]) -> None:
    resamples = 0
    for output in outputs:
        smc = output.smc
        assert smc is not None
        trace = smc.trace
        assert trace is not None
        identity = np.arange(N)
        assert (trace.ancestors[~trace.resampled] == identity).all()
        np.testing.assert_allclose(trace.ess, effective_sample_size(jnp.asarray(trace.log_weights)), rtol=1e-6)
        for t in range(1, len(trace.ess)):  # a finished row stands still; weights go on from where they were
            before = trace.lengths[t - 1]
            grown = trace.lengths[t] - before[trace.ancestors[t]]
            assert ((grown >= 0) & (grown <= 4)).all()
        last = trace.lengths[-1]
        assert last.tolist() == [len(p.token_ids) for p in smc.particles]
        # The last resampling may be what ended the population, by killing its unfinished rows.
        np.testing.assert_array_equal(smc.log_weights, np.where(trace.resampled[-1], 0, trace.log_weights[-1]))
        assert output.metrics.resamples == trace.resampled.sum()
        assert output.metrics.mean_ess == pytest.approx(trace.ess.mean())
        assert output.metrics.drafted == output.metrics.cycles * N * 3
        assert output.metrics.generated_tokens == len(output.outputs[0].token_ids)
        resamples += output.metrics.resamples
    assert resamples >= 2  # else nothing above was put to the test


def test_log_evidence_follows_from_the_trace(outputs: list[RequestOutput]) -> None:
    closings = []
    for output in outputs:
        smc = output.smc
        assert smc is not None
        assert smc.trace is not None
        terms = [logsumexp(w) - np.log(N) for w in smc.trace.log_weights[smc.trace.resampled].astype(np.float64)]
        closing = logsumexp(smc.log_weights.astype(np.float64)) - np.log(N)
        assert smc.log_evidence == pytest.approx(sum(terms) + closing, abs=1e-4)
        closings.append(closing)
    assert sum(abs(closing) > 1e-2 for closing in closings) >= 2  # else the closing term would not be seen


def test_counters_and_free_pages(llm: LLM) -> None:
    before = llm.metrics()
    outputs = llm.generate(["ab"] * 5, SamplingParams(max_tokens=9), use_tqdm=False)
    after = llm.metrics()
    assert after["kv_pages_free"] == after["kv_pages_total"] > 0
    assert after["num_running"] == after["num_waiting"] == 0
    assert after["requests"] - before["requests"] == 5
    for name in ("cycles", "resamples", "generated_tokens"):
        assert after[name] - before[name] == sum(getattr(output.metrics, name) for output in outputs)
    assert all(0 < output.metrics.seconds < 60 for output in outputs)
    assert all(output.metrics.tokens_per_second > 0 for output in outputs)


@pytest.mark.slow
def test_nothing_about_a_request_recompiles(llm: LLM, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted twice: by the engine's own counter, and by JAX for whatever it might compile behind our back."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def session(engine: LLM) -> None:
        prompts = ["a", "hello there", "q" * 40, "zz"]
        for shift in range(3):
            params = [
                SamplingParams(
                    seed=shift * 7 + i,
                    temperature=0.5 + 0.3 * i + shift,
                    max_tokens=1 + 5 * i + shift,
                    min_tokens=i % 2,
                    stop_token_ids=list(range(i)),
                    ignore_eos=i % 2 == 0,
                    logprobs=None if shift % 2 else 0,
                )
                for i in range(4)
            ]
            engine.generate(prompts[shift:] + prompts[:shift], params, use_tqdm=False)
            engine.metrics()

    for engine in (llm, plain):
        Later.none_is_left(engine.engine.runner.programs)  # of a file before this one, which may never have called it
        engine.generate(["warm"] * 4, SamplingParams(max_tokens=2), use_tqdm=False)
        engine.metrics()
        programs = engine.metrics()["compilations"]
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(jax, "eval_shape", None)  # nor is anything traced: seconds a batch for a large model
                session(engine)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert engine.metrics()["compilations"] == programs
        assert compiled == []

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 3.25 + 1)(1.0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled  # the listener does hear compilations
