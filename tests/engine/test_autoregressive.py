"""`Autoregressive` through `LLM`: greedy runs, truncation, the law of a draw."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from smcjax import LLM, RequestOutput, SamplingParams
from smcjax.model import logits
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm

pytestmark = pytest.mark.all_sizes

_logits = jax.jit(logits, static_argnums=0)


def last_scores(llm: LLM, output: RequestOutput) -> np.ndarray:
    """The dense model's logits [T, V] that each generated token was drawn from."""
    answer, start = output.outputs[0].token_ids, len(output.prompt_token_ids)
    row = np.array([output.prompt_token_ids + answer])
    return np.asarray(_logits(llm.models.target, llm.models.target_params, row)[0, start - 1 : -1], np.float64)


@pytest.mark.slow
def test_temperature_zero_takes_the_largest(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for output in plain.generate(["ab", "hello"], params, use_tqdm=False):
        assert output.outputs[0].token_ids == last_scores(plain, output).argmax(-1).tolist()
        assert output.metrics.cycles == 19
        assert output.metrics.drafted == 0


@pytest.mark.slow
def test_top_k_and_top_p_keep_their_sets(plain: LLM) -> None:
    kinds = [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 6, "top_p": 0.6, "temperature": 0.7}, {}]
    params = [SamplingParams(seed=i, max_tokens=40, ignore_eos=True, **kind) for i, kind in enumerate(kinds)]
    before = plain.metrics()["compilations"]
    outputs = plain.generate(["ab"] * 4, params, use_tqdm=False)
    assert plain.metrics()["compilations"] > before  # truncation has a program of its own
    outside = []
    for output, one in zip(outputs, params, strict=True):
        scores = last_scores(plain, output) / one.temperature
        probability = np.exp(scores - scores.max(-1, keepdims=True))
        order = np.argsort(-probability, axis=-1)
        rank = np.argsort(order, axis=-1)
        kept = rank < one.top_k if one.top_k > 0 else np.ones_like(rank, bool)
        masked = np.where(kept, probability, 0)
        masked /= masked.sum(-1, keepdims=True)
        above = np.where(masked[:, None, :] > masked[:, :, None], masked[:, None, :], 0).sum(-1)
        kept &= above < one.top_p + 1e-6
        chosen = np.take_along_axis(kept, np.array(output.outputs[0].token_ids)[:, None], axis=1)
        outside.append(int((~chosen).sum()))
        assert kept.sum(-1).max() < 264 or one.top_p == 1.0
    assert outside == [0, 0, 0, 0]
    # The plain request beside them is not cut: its tokens leave the sets of the others.
    scores = last_scores(plain, outputs[3])
    ranks = np.argsort(np.argsort(-scores, axis=-1), axis=-1)
    assert np.take_along_axis(ranks, np.array(outputs[3].outputs[0].token_ids)[:, None], axis=1).max() >= 3


@pytest.mark.slow
def test_truncating_neighbours_change_nothing(plain: LLM) -> None:
    params = [SamplingParams(seed=4, max_tokens=15), SamplingParams(seed=5, max_tokens=15, top_k=2)]
    alone = [plain.generate("ab", one, use_tqdm=False)[0].outputs for one in params]
    together = plain.generate(["ab", "ab"], params, use_tqdm=False)
    assert [output.outputs for output in together] == alone


@pytest.mark.parametrize("change", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.9}])
def test_smc_names_the_decoder_that_can(llm: LLM, plain: LLM, change: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=2, **change)
    with pytest.raises(ValueError, match=r"use decoding=Rejection\(\) or Autoregressive\(\)"):
        llm.generate("ab", params)
    assert plain.generate("ab", params, use_tqdm=False)[0].error is None


@pytest.mark.slow
def test_smc_and_the_target_alone_share_the_law_of_the_first_token(pair: Pair, plain: LLM) -> None:
    """x₀ of SMC with one particle is a draw from p_T, as the first token of `Autoregressive` is."""
    count = 1024
    params = [SamplingParams(seed=seed, max_tokens=1, temperature=0.5) for seed in range(count)]
    scores = last_scores(plain, plain.generate("ab", params[0], use_tqdm=False)[0])[0] / 0.5
    p = np.exp(scores - scores.max())
    p /= p.sum()
    with smc_llm(pair, {"n_particles": 1}, max_num_seqs=64) as one:
        for engine in (one, plain):
            firsts = [o.outputs[0].token_ids[0] for o in engine.generate(["ab"] * count, params, use_tqdm=False)]
            observed = np.bincount(firsts, minlength=len(p))[: len(p)] / count
            top = np.argsort(-p)[:8]
            assert (np.abs(observed[top] - p[top]) < 5 * np.sqrt(p[top] * (1 - p[top]) / count)).all()
            assert observed[p < 1e-5].sum() < 0.02
