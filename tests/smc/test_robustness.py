"""Degenerate weights end one group only; keys never repeat; streaming is final; laws 1 and 7."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smcjax.model.attention
from smcjax import smc
from smcjax.decoding.sampling import Purpose, column_keys, group_keys, row_keys
from smcjax.decoding.speculation import propose, reserve, score
from smcjax.pallas import paged_attention_reference
from smcjax.smc import cycle
from smcjax.smc.weights import bonus_increment, draft_increment
from tests.helpers import (
    Ask,
    assert_pages_sound,
    batch,
    finish,
    outputs,
    published,
    select,
    start,
    step,
    tiny_pair,
    tiny_params,
    with_nan_behind,
)
from tests.lazily import program_patches
from tests.smc import reference

MAX_MODEL_LEN = 24
PAIR = tiny_pair(6)
PROGRAM = PAIR.program(MAX_MODEL_LEN, page_size=4, ess_threshold=0.95)
BAD = 5  # forbidden as a stop token that the minimum rules out, so only prompts contain it
FREE: dict[str, Any] = {"stops": (BAD,), "min_tokens": 100}
ASKS = [
    Ask((1, 3, 0, 2, 2, 1), max_tokens=9, seed=1, **FREE),
    Ask((2, 1, 1), max_tokens=16, seed=2, **FREE),
    Ask((0, 1, 2, 3, 1, 2, 3, 0, 2), max_tokens=12, seed=3, **FREE),
]
SPOILED = dataclasses.replace(ASKS[1], prompt=(2, BAD, 1))


def assert_same_groups(a: smc.State, b: smc.State, groups: tuple[int, ...]) -> None:
    for group in groups:
        assert outputs(a)[group] == outputs(b)[group]
        np.testing.assert_array_equal(a.log_weight[group], b.log_weight[group])
        np.testing.assert_array_equal(a.log_evidence[group], b.log_evidence[group])
        assert not a.failed[group]


@pytest.mark.slow
def test_nan_ends_its_group_alone() -> None:
    """A NaN in one group changes no bit of another, nor of the requests that get its pages afterwards."""
    params = with_nan_behind(PAIR.params, BAD)
    clean, _ = finish(PROGRAM, params, start(PROGRAM, params, ASKS))
    assert not clean.failed.any()
    spoiled, _ = finish(PROGRAM, params, start(PROGRAM, params, [ASKS[0], SPOILED, ASKS[2]]))
    assert spoiled.failed.tolist() == [False, True, False]
    assert_same_groups(spoiled, clean, (0, 2))
    memory = spoiled.release()
    assert int(memory.pool.num_free) == memory.pool.refcount.size - 1
    assert any(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(memory.target)), "there must be NaN left behind"
    again, _ = finish(PROGRAM, params, start(PROGRAM, params, ASKS, memory=memory))
    assert_same_groups(again, clean, (0, 1, 2))


@pytest.mark.slow
def test_control_reading_stale_values_spreads_the_nan() -> None:
    """Negative control: if attention trusts every slot up to its last query, stale NaN spoils later requests."""

    def trusting(q: Any, k: Any, v: Any, table: Any, positions: Any, lengths: Any, **_: Any) -> Any:
        return paged_attention_reference(q, k, v, table, positions, positions.max(axis=1) + 1)

    def fresh_init(params: Any, prompts: Any, requests: Any, memory: Any) -> Any:
        return smc.init(PROGRAM, params, prompts, requests, memory=memory)

    memory = PROGRAM.create_memory(PAIR.params, 60)
    memory = dataclasses.replace(memory, target=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), memory.target))
    prompts, requests = batch(ASKS, 6, MAX_MODEL_LEN)
    assert not jax.jit(fresh_init)(PAIR.params, prompts, requests, memory).failed.any()
    with program_patches(smcjax.model.attention, "paged_attention", trusting):
        failed = jax.jit(lambda *args: fresh_init(*args))(PAIR.params, prompts, requests, memory).failed
    assert failed.any()


@pytest.mark.parametrize("weights", [[-np.inf] * 3, [0.0, np.nan, 0.0], [np.nan] * 3, [0.0, np.inf, 0.0]], ids=str)
def test_unusable_weights_end_their_group_alone(weights: list[float]) -> None:
    state = start(PROGRAM, PAIR.params, ASKS)
    clean, _ = finish(PROGRAM, PAIR.params, state)
    hurt = dataclasses.replace(state, log_weight=state.log_weight.at[1].set(jnp.asarray(weights)))
    hurt, _ = step(PROGRAM, PAIR.params, hurt)
    assert hurt.failed.tolist() == [False, True, False]
    assert not hurt.running[1]
    hurt, _ = finish(PROGRAM, PAIR.params, hurt)
    assert_pages_sound(hurt.sequences.block_table, hurt.memory.pool)
    assert_same_groups(hurt, clean, (0, 2))


@pytest.mark.parametrize("dead", [{0}, {1}, {2}, {0, 2}])
def test_rows_without_weight_are_never_drawn(dead: set[int]) -> None:
    """Rows of weight −inf are no ancestors and no answer, and do not fail their group."""
    state = start(PROGRAM, PAIR.params, ASKS)
    weights = jnp.asarray([-np.inf if i in dead else 0.0 for i in range(3)], jnp.float32)
    after, info = step(PROGRAM, PAIR.params, dataclasses.replace(state, log_weight=state.log_weight + weights[None]))
    assert not after.failed.any()
    assert info.resampled.all()
    assert not set(np.asarray(info.ancestors).ravel().tolist()) & dead
    unresampled = dataclasses.replace(after, log_weight=jnp.tile(weights, (3, 1)))
    for seed in range(20):
        keys = jax.vmap(jax.random.key)(jnp.arange(3) + 10 * seed)
        drawn = dataclasses.replace(unresampled, requests=dataclasses.replace(state.requests, key=keys))
        assert not set(np.asarray(select(PROGRAM, drawn)).tolist()) & dead


def test_no_key_is_used_twice_nor_as_a_parent() -> None:
    """Every draw's key differs from every other's, and none is a key that others are folded from."""
    n, gamma, cycles = 9, 4, 3
    requests = jax.vmap(jax.random.key)(jnp.arange(2))
    used = []
    parents = [requests]
    for c in range(cycles):
        now = jnp.full(2, c)
        at = jax.vmap(jax.random.fold_in)(requests, now)
        parents += [at, *(jax.vmap(lambda key, r=r: jax.random.fold_in(key, r))(at) for r in range(n))]
        draft = row_keys(requests, now, n, Purpose.DRAFT)
        parents.append(draft)
        used += [row_keys(requests, now, n, Purpose.FIRST), row_keys(requests, now, n, Purpose.BONUS)]
        used += [column_keys(draft, column) for column in range(gamma)]
        used += [
            group_keys(requests, now, one) for one in (Purpose.RESAMPLE, Purpose.SELECT, Purpose.ACCEPT, Purpose.END)
        ]

    def data(keys: list[jax.Array]) -> list[tuple[int, ...]]:
        return [tuple(k) for k in np.concatenate([np.asarray(jax.random.key_data(k)) for k in keys]).tolist()]

    assert len(set(data(used))) == len(data(used)) == 2 * cycles * (n * (2 + gamma) + 4)
    assert not set(data(used)) & set(data(parents))
    naive = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, 0), 3))(requests)
    assert set(data([naive])) <= set(data(parents)), "control: a small purpose would be some row's parent key"


def common_prefix(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest prefix of all rows."""
    agree = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return tuple(column[0] for column in agree)


@pytest.mark.slow
def test_streaming_prefix_is_final() -> None:
    """Law 8: what all rows of weight > −inf agree on after resampling stays the answer's prefix, for any `select`.

    Control: what the heaviest rows agree on does not.
    """
    program = PAIR.program(20, page_size=4, gamma=2)
    groups = 24
    state = start(program, PAIR.params, [Ask((1, 2), 17, seed=seed, stops=(4,)) for seed in range(groups)])
    some_die = jnp.where(jnp.arange(groups) % 3 == 0, -jnp.inf, 0.0)
    state = dataclasses.replace(state, log_weight=state.log_weight.at[:, 0].add(some_die))
    certain: list[list[tuple[int, ...]]] = [[] for _ in range(groups)]
    hasty: list[list[tuple[int, ...]]] = [[] for _ in range(groups)]
    while state.running.any():
        for group, rows in enumerate(outputs(state)):
            w = np.asarray(state.log_weight[group])
            certain[group].append(common_prefix([row for row, x in zip(rows, w, strict=True) if x > -np.inf]))
            hasty[group].append(common_prefix([row for row, x in zip(rows, w, strict=True) if x == w.max()]))
        state, _ = step(program, PAIR.params, state)
    best = dataclasses.replace(program, decoding=dataclasses.replace(program.decoding, select="best"))
    assert not state.failed.any()
    largest = np.argmax(state.log_weight, axis=1)
    np.testing.assert_array_equal(select(best, state), largest)
    assert (np.asarray(select(program, state)) != largest).any(), "control"
    revoked = 0
    for way in (program, best):
        for group, chosen in enumerate(select(way, state).tolist()):
            answer = outputs(state)[group][chosen]
            assert all(answer[: len(prefix)] == prefix for prefix in certain[group])
            lengths = [len(prefix) for prefix in certain[group]]
            assert lengths == sorted(lengths)
            revoked += sum(answer[: len(prefix)] != prefix for prefix in hasty[group])
    assert revoked > 0, "control"
    assert any(len(prefix) > 0 for prefixes in certain for prefix in prefixes), "something must stream"


@pytest.mark.slow
def test_draft_equal_to_target_changes_no_weight() -> None:
    """Law 1: every increment 0 to rounding, ESS = N, no resampling at threshold .9; another draft is the control."""
    program = dataclasses.replace(PAIR, draft=PAIR.target).program(MAX_MODEL_LEN, ess_threshold=0.9)
    asks = [Ask((1, 2, 3), 16, stops=(4,), seed=3), Ask((2,), 9, temperature=0.6, min_tokens=4, stops=(0, 4), seed=4)]
    for draft, equal in ((PAIR.params.target, True), (tiny_params(PAIR.target, 9), False)):
        params = smc.PairParams(PAIR.params.target, draft)
        state, infos = finish(program, params, start(program, params, asks))
        weights = np.stack([np.asarray(info.log_weight) for info in infos])
        assert (np.abs(weights).max() < 1e-4) == equal
        assert np.allclose(np.stack([info.ess for info in infos]), 3, atol=1e-3) == equal
        assert any(bool(info.resampled.any()) for info in infos) != equal
        assert np.allclose(smc.log_evidence(state), 0, atol=1e-4) == equal


@functools.partial(jax.jit, static_argnums=0)
def propose_and_verify(program: smc.Program, params: smc.PairParams, prompts: Any, requests: Any) -> tuple[Any, ...]:
    """The first cycle up to its weights: state, drafts, increments."""
    state = smc.init(program, params, prompts, requests)
    state, copies = reserve(program, state)
    state, drafts = propose(program, params, state, cycle.draft_distribution(state, None), copies)
    state, logits, _ = score(program, params, state, drafts.tokens, copies)
    block = smc.KeepAll().judge(cycle.scored_drafts(program, state, logits, drafts, None))
    return state, drafts.tokens, block.increments


@pytest.mark.slow
def test_matched_temperatures_leave_the_log_normaliser() -> None:
    """Law 1: draft = target and T_q = T_p/α → each draft increment is its column's LSE(αℓ/T) − α·LSE(ℓ/T)."""
    params = smc.PairParams(PAIR.params.target, PAIR.params.target)
    power = 2.0
    config = published(4, 3, power=power, draft_temperature=0.8 / power)
    program = smc.Program(config, PAIR.target, PAIR.target, MAX_MODEL_LEN, page_size=4)
    for temperature in (0.8, 1.1):  # the control: another temperature than the draft's
        prompts, requests = batch([Ask((1, 2, 3), 16, temperature=temperature, seed=7)], 6, MAX_MODEL_LEN)
        state, drafts, increments = propose_and_verify(program, params, prompts, requests)
        after = reference.language_model(PAIR.target, PAIR.params.target, MAX_MODEL_LEN)
        expected = np.zeros((4, 3))
        for row, column in np.ndindex(4, 3):
            committed = np.asarray(state.sequences.tokens)[row, : int(state.sequences.length[row])].tolist()
            tempered = after(committed + np.asarray(drafts)[row, :column].tolist()).astype(float) / temperature
            expected[row, column] = reference.lse(power * tempered) - power * reference.lse(tempered)
        assert np.allclose(increments[:, :3], expected, atol=1e-4) == (temperature == 0.8)
        assert np.abs(expected).max() > 0.1


def test_increments_by_hand() -> None:
    """α·log p − log q; log Σ p^α; NaN logits stay NaN at α = 1 too."""
    p, q = jnp.log(jnp.asarray([0.5, 0.3, 0.2])), jnp.log(jnp.asarray([0.2, 0.2, 0.6]))
    np.testing.assert_allclose(draft_increment(2.0, p, q), np.log([0.25 / 0.2, 0.09 / 0.2, 0.04 / 0.6]), rtol=1e-5)
    np.testing.assert_allclose(bonus_increment(2.0, p + 3.0), np.log(0.25 + 0.09 + 0.04), rtol=1e-5)
    assert float(bonus_increment(1.0, p + 3.0)) == 0.0
    for power in (1.0, 2.0):
        for broken in ([0.0, jnp.nan], [0.0, jnp.inf], [-jnp.inf, -jnp.inf]):
            assert jnp.isnan(bonus_increment(power, jnp.asarray(broken)))
        assert jnp.isfinite(bonus_increment(power, jnp.asarray([0.0, -jnp.inf])))


@pytest.mark.slow
def test_edges() -> None:
    """Law 7: one particle, a prompt of one token, one token to generate, a prompt that leaves room for one."""
    program = PAIR.program(MAX_MODEL_LEN, n_particles=1, gamma=1, ess_threshold=1.0)
    asks = [Ask((2,), 1, seed=4), Ask((2,), 2, seed=4), Ask((1, 2) * 11 + (3,), 9, seed=4), Ask((1, 2, 3), 8, seed=4)]
    state, infos = finish(program, PAIR.params, start(program, PAIR.params, asks))
    assert not state.failed.any()
    for group, ask in enumerate(asks):
        wanted = ask.limit(MAX_MODEL_LEN) - len(ask.prompt)
        assert [len(row) for row in outputs(state)[group]] == [wanted]
        assert sum(bool(info.ran[group]) for info in infos) == -(-(wanted - 1) // 2)
    assert jnp.isfinite(smc.log_evidence(state)).all()


def test_the_first_cycle_writes_nothing_to_a_prompts_full_page() -> None:
    """It may be shared: KV of the token before the last is there, and what would write it anew goes to the trash."""
    state = start(PROGRAM, PAIR.params, [Ask((1, 3, 0, 2), 11, seed=2, **FREE), *ASKS[1:]])
    page = int(state.sequences.block_table[0, 0])
    draft = jax.tree.map(lambda leaf: leaf.at[page].multiply(2.0), state.memory.draft)
    state = dataclasses.replace(state, memory=dataclasses.replace(state.memory, draft=draft))
    after, _ = step(PROGRAM, PAIR.params, state)
    chex.assert_trees_all_equal(*(jax.tree.map(lambda leaf: leaf[page], one) for one in (after.memory.draft, draft)))
