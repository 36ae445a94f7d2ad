"""Values that a host sends late: law 2 for p·Φ through the running cycle, against Ω under the dense forward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from smcjax.smc import steering
from smcjax.smc.history import log_mean
from smcjax.smc.steering import TextValues, steered
from tests import exact
from tests.helpers import Ask, assert_pages_sound, batch, outputs, start, tiny_pair
from tests.lazily import program_patches
from tests.smc import reference

V, GROUPS, MAX_MODEL_LEN = 3, 1024, 12
TINY = tiny_pair(V, target_layers=1)
# The target at another temperature as the draft: a mild mismatch, so that no weight is extreme and z-tests hold.
PAIR = dataclasses.replace(TINY, draft=TINY.target, params=smc.PairParams(TINY.params.target, TINY.params.target))
MILD = {"gamma": 1, "draft_temperature": 1.4}
ASK = Ask((1, 2), max_tokens=6, stops=(2,), temperature=0.9, min_tokens=4)
FUNCTIONS: dict[str, Callable[[exact.Tokens], float]] = {
    "1": lambda x: 1.0,
    "length": len,
    "ends in a stop": lambda x: x[-1] == 2,
    "third token is 1": lambda x: len(x) > 2 and x[2] == 1,
    "parity": lambda x: (-1.0) ** sum(x),
}


def log_value(tokens: Any, length: Any, *, whole: bool) -> Any:
    """log ψ: of a beginning what has little to do with what the whole answer is worth. Zeros forbid a third token 0."""
    inside = jnp.arange(tokens.shape[-1])[None, None] < length[..., None]
    ones = jnp.sum(inside & (tokens == 1), axis=-1, dtype=jnp.float32)
    forbidden = (length > 2) & (tokens[..., 2] == 0)
    value = 0.8 * ones if whole else 0.8 * ones + 0.7 + jnp.where(tokens[..., 0] == 0, 0.5, 0.0)
    return jnp.where(forbidden, -jnp.inf, value)


def factor(answer: exact.Tokens) -> float:
    """Φ, in plain Python."""
    return 0.0 if len(answer) > 2 and answer[2] == 0 else float(np.exp(0.8 * sum(token == 1 for token in answer)))


def rows(state: smc.State) -> tuple[Any, Any]:
    """The answers' tokens [G, N, T] and lengths [G, N]."""
    begin, shape = len(ASK.prompt), state.log_weight.shape
    return state.sequences.tokens.reshape(*shape, -1)[:, :, begin:], state.sequences.length.reshape(shape) - begin


def host(state: smc.State) -> Any:
    """What functions of text would say about the rows."""
    tokens, length = rows(state)
    finished = state.sequences.finished.reshape(length.shape)
    value = jnp.where(finished, log_value(tokens, length, whole=True), log_value(tokens, length, whole=False))
    return value.astype(jnp.float32)


def populations(config: dict[str, Any], asked: Callable[[int], bool] = lambda cycle: True) -> list[Any]:
    """Final tokens, lengths, weights and log Ẑ of groups whose values come two cycles late, behind cycles `asked`."""
    program = PAIR.program(MAX_MODEL_LEN, **{"n_particles": 3, "ess_threshold": 0.9, **MILD, **config})
    cycles = ASK.max_tokens - 1 + program.decoding.pipelined

    @jax.jit
    def begin() -> tuple[smc.State, jax.Array]:
        prompts, requests = batch([ASK], V, MAX_MODEL_LEN)
        prompts = jnp.tile(prompts, (GROUPS, 1))
        requests = jax.tree.map(lambda x: jnp.repeat(x, GROUPS, axis=0), requests)
        requests = dataclasses.replace(requests, key=jax.random.split(jax.random.key(0), GROUPS))
        state = smc.init(program, PAIR.params, prompts, requests)
        return state, host(state)

    @jax.jit
    def advance(state: smc.State, values: TextValues) -> tuple[smc.State, smc.Info, jax.Array]:
        state, info = steered(functools.partial(smc.step, program, PAIR.params), state, values)
        return state, info, host(state)

    state, first = begin()
    told, resampled = [first], np.zeros(GROUPS, bool)
    for cycle in range(1, cycles + 1):
        known = jnp.full(GROUPS, cycle > 2 and asked(cycle - 2))
        state, info, said = advance(state, TextValues(told[max(cycle - 2, 0)], known, jnp.zeros(GROUPS, bool)))
        resampled |= np.asarray(info.resampled & info.ran)
        told.append(said)
    assert not state.running.any()
    assert resampled.mean() > 0.1
    tokens, length = rows(state)
    final = log_value(tokens, length, whole=True)
    dead = jnp.isneginf(state.log_weight) | jnp.isneginf(final)
    log_weight = jnp.where(dead, -jnp.inf, state.log_weight + final - state.log_text_potential)
    return [*map(np.asarray, (tokens, length, log_weight, state.log_evidence, state.failed))]


def z_scores(found: list[Any]) -> dict[str, float]:
    """How many standard errors Ẑ·Σ W_i f(x_i) is off, for each f; groups without a weight count as 0."""
    tokens, length, log_weight, log_evidence, failed = found
    law = exact.outcomes(reference.language_model(PAIR.target, PAIR.params.target, MAX_MODEL_LEN), ASK, MAX_MODEL_LEN)
    weight = np.where(failed[:, None], 0.0, np.exp(log_weight + log_evidence[:, None])) / log_weight.shape[1]
    padded = np.where(np.arange(tokens.shape[-1]) < length[..., None], tokens, -1).reshape(-1, tokens.shape[-1])
    distinct, which = np.unique(padded, axis=0, return_inverse=True)
    scores = {}
    for name, f in FUNCTIONS.items():
        want = sum(mass * factor(x) * f(x) for x, mass in law.items())
        of_distinct = np.array([f(tuple(token for token in row if token >= 0)) for row in distinct.tolist()])
        each = (weight * of_distinct[which].reshape(weight.shape)).sum(axis=1)
        scores[name] = (each.mean() - want) / (each.std() / np.sqrt(len(each)) + 1e-6)
    return scores


CONFIGS: dict[str, dict[str, Any]] = {
    "control, early end": {"bonus": False, "control": 0.4, "early_end": True},
    "pipelined": {"pipelined": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_estimates_are_unbiased(config: str) -> None:
    """However often beginnings are asked, one cycle late, and whatever they are worth."""
    asked = {"pipelined": lambda cycle: cycle == 2}.get(config, lambda cycle: True)
    scores = z_scores(populations(CONFIGS[config], asked=asked))
    assert max(map(abs, scores.values())) < 4, scores


def ignores_parents(state: smc.State, values: TextValues) -> smc.State:
    """Planted: a copy takes the value of whichever row was in its place."""
    own = jnp.broadcast_to(jnp.arange(state.parent.shape[1], dtype=jnp.int32), state.parent.shape)
    return _weigh(dataclasses.replace(state, parent=own), values)


def loses_weight(state: smc.State, values: TextValues) -> smc.State:
    """Planted: what a weight has of a beginning is lost in a row that a resampling made of another one."""
    own = jnp.arange(state.parent.shape[1], dtype=jnp.int32)
    kept = jnp.where(state.parent == own[None], state.log_text_potential, 0.0)
    return _weigh(dataclasses.replace(state, log_text_potential=kept), values)


_weigh = steering.weigh_by


@pytest.mark.slow
def test_a_mistake_is_seen() -> None:
    """Negative control: terms that do not telescope behind a resampling."""
    with program_patches(steering, "weigh_by", loses_weight):
        scores = z_scores(populations(CONFIGS["control, early end"]))
    assert max(map(abs, scores.values())) > 8, scores


ASKS = [Ask((1, 0, 2, 2), max_tokens=9, stops=(2,), min_tokens=6, seed=seed) for seed in (3, 5, 8)]


def followed(mistake: Any = None) -> list[tuple[np.ndarray, ...]]:
    """A run with values two cycles late. For each cycle the values, the ancestors, the groups that ran, what rows have.

    A row's value is a sum over its own tokens.
    """
    program = PAIR.program(24, page_size=4, n_particles=4, bonus=False, control=0.0, ess_threshold=0.9, **MILD)
    step = jax.jit(functools.partial(smc.step, program, PAIR.params))
    state, groups = start(program, PAIR.params, ASKS), len(ASKS)
    behind, cycles = [state], []

    def value(state: smc.State) -> Any:
        tokens = state.sequences.tokens.reshape(*state.log_weight.shape, -1)
        length = state.sequences.length.reshape(state.log_weight.shape)
        inside = jnp.arange(tokens.shape[-1])[None, None] < length[..., None]
        return jnp.where(inside, tokens, 0).sum(axis=-1).astype(jnp.float32) / 7

    with program_patches(steering, "weigh_by", mistake or _weigh):
        while state.running.any():
            values = value(behind[max(len(behind) - 2, 0)])
            ran, known = np.asarray(state.running), jnp.full(groups, len(behind) > 2)
            state, info = steered(step, state, TextValues(values, known, jnp.zeros(groups, bool)))
            assert_pages_sound(state.sequences.block_table, state.memory.pool)
            behind.append(state)
            cycles.append((np.asarray(values), np.asarray(info.ancestors), ran, np.asarray(state.log_text_potential)))
    assert not state.failed.any()
    return cycles


def wrong(cycles: list[tuple[np.ndarray, ...]]) -> float:
    """How far what rows have is from the value of the row that they were two cycles ago, by Python."""
    has, parent, off = np.zeros((len(ASKS), 4)), np.tile(np.arange(4), (len(ASKS), 1)), 0.0
    for cycle, (values, ancestors, ran, found) in enumerate(cycles, 1):
        for group in np.flatnonzero(ran):
            if cycle > 2:
                has[group] = values[group][parent[group]]
            has[group], parent[group] = has[group][ancestors[group]], ancestors[group]
        off = max(off, float(np.abs(found - has).max()))
    return off


@pytest.mark.slow
def test_a_copy_has_the_value_of_the_row_that_it_was() -> None:
    """Values follow rows through two cycles' resamplings; those of whichever row is in its place do not."""
    cycles = followed()
    assert any((ancestors[ran] != np.arange(4)).any() for _, ancestors, ran, _ in cycles)
    assert wrong(cycles) < 1e-5
    assert wrong(followed(ignores_parents)) > 0.1


ALWAYS = PAIR.program(24, page_size=4, n_particles=4, gamma=2, ess_threshold=1.0)  # resampled in every cycle
step = jax.jit(functools.partial(smc.step, ALWAYS, PAIR.params))


@pytest.mark.slow
def test_a_group_that_waits_stands_still() -> None:
    """Its tokens are those of a run without a wait; the others' too."""
    nothing = TextValues.nothing(len(ASKS), 4)
    plain = start(ALWAYS, PAIR.params, ASKS)
    while plain.running.any():
        plain, _ = steered(step, plain, nothing)
    for pattern in (lambda cycle: [cycle % 3 != 0, False, cycle % 2 == 0], lambda cycle: [True, cycle < 4, False]):
        state, cycle = start(ALWAYS, PAIR.params, ASKS), 0
        while state.running.any() and cycle < 40:
            cycle += 1
            waits = np.array(pattern(cycle)) & (cycle < 20)
            before = state
            state, info = steered(step, state, dataclasses.replace(nothing, waits=jnp.asarray(waits)))
            assert (np.asarray(info.ran) == (np.asarray(before.running) & ~waits)).all()
            assert (np.asarray(state.running)[waits] == np.asarray(before.running)[waits]).all()
        assert outputs(state) == outputs(plain)
        np.testing.assert_array_equal(state.log_weight, plain.log_weight)


@pytest.mark.slow
def test_a_group_whose_rows_are_all_killed_ends_alone() -> None:
    values = TextValues(
        jnp.where(jnp.arange(len(ASKS))[:, None] == 1, -jnp.inf, jnp.zeros((len(ASKS), 4))),
        jnp.ones(len(ASKS), bool),
        jnp.zeros(len(ASKS), bool),
    )
    state, info = steered(step, start(ALWAYS, PAIR.params, ASKS), values)
    assert state.failed.tolist() == [False, True, False]
    assert info.done.tolist() == [False, True, False]
    assert info.ran.all(), "its report is read"
    assert log_mean(np.asarray(state.log_weight[1])) == -np.inf
