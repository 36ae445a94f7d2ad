"""The exact baseline: greedy tokens of the recorded checkpoints, the sampling law, truncation, pages, failures."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import autoregressive
from smcjax.decoders import Autoregressive
from smcjax.decoding.groups import PairParams
from smcjax.model import ModelConfig, load_checkpoint
from tests import exact
from tests.helpers import Ask, assert_pages_sound, batch, tiny_config, tiny_params
from tests.smc.reference import language_model

GOLDEN = Path(__file__).parent / "data" / "hf_golden"
V, MAX_MODEL_LEN = 4, 16
CONFIG = tiny_config(V, num_layers=1)
PARAMS = tiny_params(CONFIG, 1)
AFTER = language_model(CONFIG, PARAMS, MAX_MODEL_LEN)


@functools.partial(jax.jit, static_argnames=("program", "num_pages"))
def init(program: autoregressive.Program, params: PairParams, prompts: Any, requests: Any, num_pages: int) -> Any:
    """begin, prefill in one chunk, start."""
    memory = program.create_memory(params, num_pages)
    state = autoregressive.begin(program, memory, prompts, requests, requests.prompt_length > 0)
    hidden = jnp.zeros((prompts.shape[0], program.target.hidden_size), params.target.embed.dtype)
    state, hidden = autoregressive.prefill(program, params, state, jnp.asarray(0, jnp.int32), prompts.shape[1], hidden)
    return autoregressive.start(program, params, state, hidden)


step = jax.jit(autoregressive.step, static_argnames="program")
run = jax.jit(autoregressive.run, static_argnames=("program", "num_steps"))


def rows(state: autoregressive.State) -> list[tuple[int, ...]]:
    """Generated tokens of each request."""
    s = state.sequences
    begin = np.asarray(state.requests.prompt_length)
    return [tuple(t[b:e]) for t, b, e in zip(np.asarray(s.tokens).tolist(), begin, np.asarray(s.length), strict=True)]


def decode(
    program: autoregressive.Program, params: PairParams, asks: list[Ask], num_pages: int = 80
) -> autoregressive.State:
    """Steps until no request runs; checks the pages after each."""
    state = init(program, params, *batch(asks, program.target.vocab_size, program.max_model_len), num_pages)
    while state.running.any():
        state, info = step(program, params, state)
        assert_pages_sound(state.sequences.block_table, state.memory.pool)
        np.testing.assert_array_equal(info.done, ~state.running)
    ended, memory = jax.jit(autoregressive.conclude, static_argnames="program")(program, state)
    assert (memory.pool.refcount == 0).all()
    np.testing.assert_array_equal(ended.length[:, 0], state.sequences.length)
    return state


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_greedy_equals_transformers(name: str) -> None:
    """Temperature 0 over pages gives the recorded greedy continuations."""
    config, params = load_checkpoint(GOLDEN / name, dtype="float32")
    golden = json.loads((GOLDEN / name / "golden.json").read_text())
    steps = len(golden["greedy"][0])
    asks = [Ask(tuple(prompt), steps, temperature=0.0) for prompt in golden["prompts"]]
    length = max(len(ask.prompt) for ask in asks) + steps
    program = autoregressive.Program(Autoregressive(), config, None, length, page_size=16)
    state = init(
        program, PairParams(params), *batch(asks, config.vocab_size, length), len(asks) * program.max_pages + 1
    )
    state, _ = run(program, PairParams(params), state, steps - 1)
    assert not state.running.any()
    assert [list(row) for row in rows(state)] == golden["greedy"]


def top_k_p(k: int, p: float) -> Callable[[np.ndarray], np.ndarray]:
    """Truncation token by token, in numpy."""

    def transform(logits: np.ndarray) -> np.ndarray:
        order = sorted(range(len(logits)), key=lambda v: -logits[v])[:k]
        mass = np.exp(logits[order] - logits[order].max())
        mass /= mass.sum()
        kept, total = [], 0.0
        for v, m in zip(order, mass, strict=True):
            if total < p:
                kept.append(v)
            total += m
        out = np.full_like(logits, -np.inf)
        out[kept] = logits[kept]
        return out

    return transform


@pytest.mark.slow
def test_sampling_law() -> None:
    """χ² of 8,192 samples against every output's exact probability; the control is a law 40% warmer.

    Truncated, and no stop at once; other requests: `rejection/test_request_laws.py`.
    """
    ask = Ask((1, 2), max_tokens=3, stops=(3,), temperature=0.7, min_tokens=2, top_k=3, top_p=0.75)
    samples = 8192
    program = autoregressive.Program(
        Autoregressive(), CONFIG, None, MAX_MODEL_LEN, page_size=2, features=frozenset({"truncation"})
    )
    prompts, requests = batch([ask], V, MAX_MODEL_LEN)
    prompts, requests = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), (prompts, requests))
    requests = dataclasses.replace(requests, key=jax.random.split(jax.random.key(1), samples))
    state = init(program, PairParams(PARAMS), prompts, requests, num_pages=samples * 3 + 1)
    state, _ = run(program, PairParams(PARAMS), state, 2)
    assert not state.running.any()
    seen = collections.Counter(rows(state))

    def chi_square(temperature: float) -> tuple[float, int]:
        law = exact.outcomes(
            AFTER, dataclasses.replace(ask, temperature=temperature), MAX_MODEL_LEN, transform=top_k_p(3, 0.75)
        )
        return exact.chi_square(seen, law)

    value, bins = chi_square(ask.temperature)
    assert bins > 4
    assert value < bins + 4.5 * np.sqrt(2 * bins) + 5, (value, bins)
    value, bins = chi_square(1.4 * ask.temperature)
    assert value > bins + 12 * np.sqrt(2 * bins), "control"


@pytest.mark.slow
def test_logprobs_limits_and_company() -> None:
    """log p_T of the chosen tokens; a request's tokens do not depend on its neighbours, page size or slot."""
    asks = [
        Ask((1, 2, 3), 9, seed=1),
        Ask((2,), 20, stops=(3,), min_tokens=4, temperature=0.8, seed=2),
        Ask((0, 1) * 4, 1, seed=3),
        Ask((1, 2, 3), 9, seed=1),
    ]
    program = autoregressive.Program(Autoregressive(), CONFIG, None, MAX_MODEL_LEN, page_size=4)
    state = decode(program, PairParams(PARAMS), asks)
    got = rows(state)
    assert got[0] == got[3]
    assert len(got[2]) == 1
    for row, (ask, tokens) in enumerate(zip(asks, got, strict=True)):
        law = exact.outcomes(AFTER, dataclasses.replace(ask, max_tokens=min(3, ask.max_tokens)), MAX_MODEL_LEN)
        at = slice(len(ask.prompt), len(ask.prompt) + len(tokens[:3]))
        np.testing.assert_allclose(np.exp(state.sequences.logprobs[row, at].sum()), law[tokens[:3]], rtol=1e-4)
        assert len(tokens) == ask.limit(MAX_MODEL_LEN) - len(ask.prompt) or tokens[-1] in ask.stops
        assert not set(tokens[: ask.min_tokens]) & set(ask.stops)
    assert rows(decode(program, PairParams(PARAMS), [*asks[2:], *asks[1:3]]))[2] == got[1]
    assert rows(decode(dataclasses.replace(program, page_size=1), PairParams(PARAMS), asks)) == got
    assert rows(decode(program, PairParams(PARAMS), [dataclasses.replace(asks[0], seed=9), *asks[1:]]))[0] != got[0]


@pytest.mark.slow
def test_nan_ends_its_request_alone() -> None:
    config: ModelConfig = tiny_config(V, num_layers=2)
    params = tiny_params(config, 1)
    params = dataclasses.replace(params, embed=params.embed.at[3].set(jnp.nan))
    forbid: dict[str, Any] = {"stops": (3,), "min_tokens": 99}
    asks = [Ask((1, 2), 7, seed=1, **forbid), Ask((1, 3, 1), 7, seed=2, **forbid), Ask((2,), 9, seed=3, **forbid)]
    program = autoregressive.Program(Autoregressive(), config, None, MAX_MODEL_LEN, page_size=4)
    state = decode(program, PairParams(params), asks)
    assert state.failed.tolist() == [False, True, False]
    assert rows(state)[1] == ()
    healthy = decode(program, PairParams(params), [asks[0], dataclasses.replace(asks[1], prompt=(1, 1, 1)), asks[2]])
    assert not healthy.failed.any()
    assert [rows(state)[i] for i in (0, 2)] == [rows(healthy)[i] for i in (0, 2)]
