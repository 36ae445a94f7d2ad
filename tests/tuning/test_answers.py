"""Answers in batches, and what both models say of their tokens, against each text by itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from smcjax.engine.llm import LLM
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.model import init_params
from smcjax.model.decoder import logits
from smcjax.model.params import Params
from smcjax.tuning.answers import Answers, Batches, Sampling, answers_of, sample_outputs
from smcjax.tuning.laws import Laws, TargetStates, token_figures
from smcjax.tuning.measure import mean_of_all, measure
from tests.checkpoints import write_pair
from tests.helpers import tiny_config

V, TEMPERATURE = 11, 0.7
TARGET, DRAFT = tiny_config(V, num_layers=2), tiny_config(V, num_layers=1)
LAWS = Laws(TARGET, DRAFT, V - 1, TEMPERATURE)  # the last id is padding


def texts(n: int, longest: int, seed: int = 0) -> Answers:
    rng = np.random.default_rng(seed)
    prompt, answer = rng.integers(1, longest // 2, n), rng.integers(1, longest // 2, n)
    tokens = np.zeros((n, int((prompt + answer).max())), np.int32)
    for row, length in zip(tokens, prompt + answer, strict=True):
        row[:length] = rng.integers(1, V - 1, length)
    return Answers(tokens, prompt.astype(np.int32), answer.astype(np.int32))


@pytest.fixture(scope="module")
def params() -> tuple[Params, Params]:
    keys = jax.random.split(jax.random.key(0))
    target, draft = (init_params(config, key) for config, key in zip((TARGET, DRAFT), keys, strict=True))
    return dataclasses.replace(target, embed=20 * target.embed), dataclasses.replace(draft, embed=20 * draft.embed)


@pytest.mark.parametrize("batch_tokens", [16, 300, 10_000])
def test_an_epoch_shows_every_token_once(batch_tokens: int) -> None:
    answers = texts(40, 200)
    batches = Batches(answers, batch_tokens)
    for rng in (None, np.random.default_rng(1), np.random.default_rng(2)):
        epoch = batches.epoch(rng)
        assert len(epoch) == len(batches)
        seen = []
        for batch in epoch:
            assert batch.tokens.size <= max(batch_tokens, batch.tokens.shape[1])
            for row, tokens, places, answer, counted in zip(*batch, strict=True):
                length = int(counted.sum())
                assert counted[:length].all()
                if not length:
                    continue
                seen.append(row)
                begin = answers.prompt[row]
                wanted = answers.tokens[row, begin : begin + answers.answer[row]]
                np.testing.assert_array_equal(answer[:length], wanted)
                whole = np.append(tokens, 0)  # the last token is only predicted
                np.testing.assert_array_equal(whole[places[1:length]], wanted[:-1])
                assert places[0] == begin - 1
        assert sorted(seen) == list(range(40))
    assert batches.tokens_per_batch * len(batches) == answers.answer.sum()


def test_orders_are_functions_of_their_seed() -> None:
    batches = Batches(texts(40, 60), 200)
    orders = [[batch.rows.tolist() for batch in batches.epoch(np.random.default_rng(seed))] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.slow
def test_figures_are_those_of_each_text_alone(params: tuple[Params, Params]) -> None:
    """Whatever it is batched with; logits of padding ids have no part in them."""
    answers = texts(9, 90, seed=3)
    batches = Batches(answers, 200)
    found = token_figures(LAWS, *params, batches, TargetStates(LAWS, params[0], batches))
    dense = jax.jit(logits, static_argnums=0)
    for row, (prompt, answer) in enumerate(zip(answers.prompt, answers.answer, strict=True)):
        text = jnp.asarray(answers.tokens[row : row + 1])  # with padding behind it, which no place before it sees
        p, q = (
            softmax(
                np.asarray(dense(config, one, text), np.float64)[0, prompt - 1 :][:answer, : V - 1] / TEMPERATURE, -1
            )
            for config, one in zip((TARGET, DRAFT), params, strict=True)
        )
        index, own = np.arange(answer), answers.tokens[row, prompt : prompt + answer]
        wanted = {
            "log_ratio": np.log(p / q)[index, own],
            "log_moment": np.log((p**2 / q).sum(-1)),
            "kl": (p * np.log(p / q)).sum(-1),
            "acceptance": np.minimum(p, q).sum(-1),
        }
        for name, values in wanted.items():
            np.testing.assert_allclose(getattr(found, name)[row, :answer], values, atol=1e-3, err_msg=name)
            assert not getattr(found, name)[row, answer:].any()


def test_a_draft_that_is_the_target_has_no_divergence(params: tuple[Params, Params]) -> None:
    same = dataclasses.replace(LAWS, draft=TARGET)
    batches = Batches(texts(6, 40), 100)
    figures = measure(same, params[0], params[0], batches, TargetStates(same, params[0], batches), gamma=3)
    np.testing.assert_allclose(dataclasses.astuple(figures), [[0] * 3, [0] * 3, [0] * 3, [1] * 3], atol=1e-5)
    other = measure(LAWS, *params, batches, TargetStates(LAWS, params[0], batches), gamma=3)
    assert other.weight_variance[0] > 0.1
    assert other.kl[0] > 0.01


def test_intervals_hold_means() -> None:
    """Of 300 samples of 60 clusters the interval holds the truth about 95 times in a hundred."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        sizes = rng.integers(1, 9, 60)
        sums = sizes * rng.normal(2.0, 1.0, 60)
        mean, low, high = mean_of_all(sums, sizes)
        assert low < mean < high
        held += low <= 2.0 <= high
    assert 0.89 < held / 300 < 0.985


def test_answers_are_the_engines(tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = write_pair(tmp_path_factory.mktemp("pair"))
    sampling = Sampling(temperature=0.9, max_tokens=5, seed=2, max_num_seqs=2, max_model_len=32)
    kinds = (["ab", "c"], ["hello"])
    found, (other, _) = sample_outputs(sampling, kinds, samples=2, model=str(pair.target))
    answers = answers_of(found)
    with LLM(pair.target, max_model_len=32, max_num_seqs=2) as llm:
        outputs = llm.generate([prompt for prompt in kinds[0] for _ in range(2)], use_tqdm=False)
        seed = 5 * 1_000_003 & MAX_SEED
        params = SamplingParams(max_tokens=5, temperature=0.9, seed=seed)
        assert llm.generate("hello", params)[0].outputs[0].token_ids == other.outputs[0].token_ids
    assert answers.prompt.tolist() == [len(one.prompt_token_ids) for one in outputs]
    assert (answers.answer <= 5).all()
    for row, one in zip(answers.tokens, outputs, strict=True):
        assert row[: len(one.prompt_token_ids)].tolist() == list(one.prompt_token_ids)
    assert found[0].outputs[0].token_ids != found[1].outputs[0].token_ids, "two draws of one prompt"
