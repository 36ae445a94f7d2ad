"""The terms of a weight in float32, at the width of a real vocabulary, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from smcjax.decoders import COLDEST, SHARPEST
from smcjax.decoding.sampling import log_softmax_at
from smcjax.decoding.speculation import Drafts
from smcjax.smc import acceptance, cycle
from tests.helpers import published, tiny_config
from tests.smc.enumeration import _state as empty_state

VOCAB, ROWS, GAMMA = 49152, 8, 2
NATS = 1e-3


def real_logits(seed: int) -> np.ndarray:
    """[R, K + 1, V] float32: a bulk, up to 200 likely tokens far above it, all shifted by some nats."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((ROWS * (GAMMA + 1), VOCAB)) * 2.5
    for row in logits:
        likely = rng.choice(VOCAB, rng.integers(1, 200), replace=False)
        row[likely] += rng.gamma(2, 4, likely.size)
    logits += rng.normal(5, 8, (len(logits), 1))
    return logits.reshape(ROWS, GAMMA + 1, VOCAB).astype(np.float32)


def log_total(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1)
    return top + np.log(np.exp(logits - top[..., None]).sum(-1))


def drafted(logits: np.ndarray, temperature: float, seed: int) -> np.ndarray:
    """Tokens that a draft whose logits are off by half a nat proposes."""
    rng = np.random.default_rng(seed)
    logits = (logits + rng.normal(0, 0.5, logits.shape)) / temperature
    return np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1).astype(np.int32)


def exact(logits: np.ndarray, tokens: np.ndarray, power: float, temperature: float) -> np.ndarray:
    """[R, K + 1]: α·log p_T of the drafts, then the bonus token's term."""
    tempered = logits.astype(np.float64) / np.float64(np.float32(temperature))
    chosen = np.take_along_axis(tempered[:, :GAMMA], tokens[..., None], -1)[..., 0]
    drafts = power * (chosen - log_total(tempered[:, :GAMMA]))
    bonus = log_total(power * tempered[:, -1]) - power * log_total(tempered[:, -1])
    return np.concatenate([drafts, bonus[:, None]], axis=1)


def increments(logits: np.ndarray, tokens: np.ndarray, power: float, temperature: float) -> np.ndarray:
    """[R, K + 1]: those of `KeepAll`, log q = 0, where the target's forward gives these logits."""
    config = tiny_config(VOCAB)
    program = smc.Program(published(1, GAMMA, power=power), config, config, 16)
    state = empty_state(ROWS, 1, VOCAB, 8)
    requests = dataclasses.replace(state.requests, temperature=jnp.full(ROWS, temperature))
    state = dataclasses.replace(state, requests=requests)
    drafts = Drafts(jnp.asarray(tokens), jnp.zeros((ROWS, GAMMA)))
    block = smc.KeepAll().judge(cycle.scored_drafts(program, state, jnp.asarray(logits), drafts, None))
    return np.asarray(block.increments, np.float64)


SETTINGS = [(10.0, 0.01), (1.0, 0.001), (100.0, 0.1), (1000.0, 1.0), (1000.0, 2.0), (0.5, 0.7)]


@pytest.mark.parametrize(("power", "temperature"), SETTINGS)
def test_increments_are_exact_to_a_thousandth_of_a_nat(power: float, temperature: float) -> None:
    assert power / temperature <= SHARPEST
    logits = real_logits(1)
    tokens = drafted(logits[:, :GAMMA], temperature, 2)
    expected = exact(logits, tokens, power, temperature)
    found = increments(logits, tokens, power, temperature)
    assert (np.abs(found - expected) <= np.maximum(NATS, 2.0**-22 * np.abs(expected))).all()
    assert (np.abs(expected) < 4000).mean() > 0.7  # so that it was mostly the thousandth that held


@pytest.mark.parametrize(("power", "temperature"), [(100.0, 0.1), (1000.0, 1.0)])
def test_the_control_logits_that_are_not_relative(power: float, temperature: float, patch_programs: Any) -> None:
    logits = real_logits(1)
    tokens = drafted(logits[:, :GAMMA], temperature, 2)
    patch_programs(cycle, "temper", lambda logits, temperature: logits / temperature[..., None])
    patch_programs(
        acceptance,
        "bonus_increment",
        lambda power, logits, allowed=None: jax.nn.logsumexp(power * logits, -1) - power * jax.nn.logsumexp(logits, -1),
    )
    found = increments(logits, tokens, power, temperature)
    assert np.abs(found - exact(logits, tokens, power, temperature)).max() > NATS


def test_a_token_that_is_forbidden_costs_no_accuracy(patch_programs: Any) -> None:
    """Were logits taken relative to a stop token far above the rest, the rest would be as large as before."""
    logits = real_logits(3)
    tokens = drafted(logits[:, :GAMMA], 0.1, 2)
    stop = int(np.setdiff1d(np.arange(VOCAB), tokens)[0])
    logits[:, :, stop] = 3e4
    patch_programs(cycle, "forbid_stops", lambda logits, *_: logits.at[:, :, stop].set(-jnp.inf))
    expected = exact(np.where(np.arange(VOCAB) == stop, -np.float32(1e9), logits), tokens, 100.0, 0.1)
    found = increments(logits, tokens, 100.0, 0.1)
    np.testing.assert_allclose(found, expected, atol=NATS, rtol=2.0**-22)


def test_log_q_of_the_coldest_draft() -> None:
    """Kernels and the plain path alike round logits/T_q; they hold to `COLDEST`, and not a tenth of it."""
    for temperature, holds in ((COLDEST, True), (COLDEST / 10, False)):
        logits = real_logits(4)[:, 0]
        tokens = np.argsort(logits, axis=-1)[:, -2].astype(np.int32)  # made nearly as likely as the likeliest
        logits[np.arange(ROWS), tokens] = logits.max(-1) - temperature * np.linspace(0.1, 2, ROWS, dtype=np.float32)
        tempered = logits.astype(np.float64) / np.float64(np.float32(temperature))
        expected = np.take_along_axis(tempered, tokens[:, None], -1)[:, 0] - log_total(tempered)
        found = log_softmax_at(jnp.asarray(logits) / jnp.float32(temperature), jnp.asarray(tokens))
        assert (np.abs(np.asarray(found, np.float64) - expected).max() < NATS) == holds
