"""Law 4: what must not change an answer: schedules, calls, neighbours, batch and page sizes; law 5 on the way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from tests.helpers import Ask, assert_pages_sound, batch, finish, outputs, release, run, select, start, step, tiny_pair

PAIR = tiny_pair()
MAX_MODEL_LEN = 24
BASE = PAIR.program(MAX_MODEL_LEN, page_size=4, ess_threshold=0.95)
ASKS = [
    Ask((1, 3, 0, 2, 2), max_tokens=11, stops=(4,), min_tokens=3, seed=21),
    Ask((2,), max_tokens=16, temperature=0.7, seed=22),
    Ask((0, 1, 2, 3, 1, 2, 3, 0, 2), max_tokens=100, temperature=1.3, stops=(4,), min_tokens=6, seed=23),
    Ask((3, 3, 1), max_tokens=14, seed=24),
]


@functools.partial(jax.jit, static_argnames="program")
def start_present(
    program: smc.Program, prompts: jax.Array, requests: object, present: jax.Array, pages: int = 99
) -> smc.State:
    """`smc.init` with groups missing, and so many free pages."""
    memory = program.create_memory(PAIR.params, 100)
    memory = dataclasses.replace(memory, pool=dataclasses.replace(memory.pool, num_free=jnp.asarray(pages, jnp.int32)))
    state = smc.begin(program, memory, prompts, requests, present)
    hidden = jnp.zeros((prompts.shape[0], program.target.hidden_size))
    state, hidden = smc.prefill(program, PAIR.params, state, jnp.asarray(0, jnp.int32), prompts.shape[1], hidden)
    return smc.start(program, PAIR.params, state, hidden)


def answers(program: smc.Program, asks: Sequence[Ask] = ASKS) -> list[tuple[object, ...]]:
    """Tokens of all rows, the selected row and log Ẑ, by group; checks the pages after every cycle."""
    state = start(program, PAIR.params, asks)
    while state.running.any():
        assert_pages_sound(state.sequences.block_table, state.memory.pool)
        state, _ = step(program, PAIR.params, state)
    assert_pages_sound(state.sequences.block_table, state.memory.pool)
    assert (release(state).pool.refcount == 0).all()
    evidence = np.asarray(smc.log_evidence(state), np.float64).round(3)
    return list(zip(outputs(state), select(program, state).tolist(), evidence.tolist(), strict=True))


def assert_same_group(a: smc.State, i: int, b: smc.State, j: int, exact: bool) -> None:
    """Group i of a and group j of b: the same tokens, and weights equal to the bit or to rounding."""
    assert outputs(a)[i] == outputs(b)[j]
    tolerance = 0.0 if exact else 1e-5
    np.testing.assert_allclose(a.log_weight[i], b.log_weight[j], atol=tolerance, rtol=0)
    np.testing.assert_allclose(smc.log_evidence(a)[i], smc.log_evidence(b)[j], atol=tolerance, rtol=0)


def test_control_other_seeds_and_thresholds_give_other_answers() -> None:
    """Negative control of every comparison here."""
    other = [dataclasses.replace(ask, seed=ask.seed + 100) for ask in ASKS]
    assert all(a[0] != b[0] for a, b in zip(answers(BASE), answers(BASE, other), strict=True))


@pytest.mark.slow
def test_deferred_equals_undeferred_by_pages_of_any_size() -> None:
    undeferred = dataclasses.replace(BASE.decoding, defer_bonus=False)
    assert answers(dataclasses.replace(BASE, decoding=undeferred, page_size=7)) == answers(BASE)


@pytest.mark.slow
def test_steps_equal_one_run_and_ended_groups_are_frozen() -> None:
    """`run(n)` is n steps to the bit; groups that ended in between do not change by a bit afterwards."""
    state = start(BASE, PAIR.params, ASKS)
    at_end: dict[int, list[np.ndarray]] = {}
    stepped, infos = state, []
    for _ in range(6):
        stepped, info = step(BASE, PAIR.params, stepped)
        infos.append(info)
        for group in np.flatnonzero(~np.asarray(stepped.running)):
            rows = slice(group * 3, (group + 1) * 3)
            now = [np.asarray(x[rows]) for x in jax.tree.leaves(stepped.sequences)]
            now += [np.asarray(x[group]) for x in (stepped.log_weight, stepped.log_evidence, stepped.cycle)]
            chex.assert_trees_all_equal(now, at_end.setdefault(int(group), now))
    assert len(at_end) == 4
    assert len({tuple(np.asarray(info.ran).tolist()) for info in infos}) > 2, "groups must end at different times"
    together, stacked = run(BASE, PAIR.params, state, 6)
    chex.assert_trees_all_equal(*((one.sequences, one.log_weight) for one in (together, stepped)))
    for index, info in enumerate(infos):
        live = np.asarray(info.ran)
        np.testing.assert_array_equal(stacked.ran[index], live)
        np.testing.assert_array_equal(stacked.ancestors[index][live], info.ancestors[live])
        np.testing.assert_array_equal(stacked.log_weight[index][live], info.log_weight[live])


def test_alone_equals_in_a_batch() -> None:
    """One program gives a group equal bits with neighbours and without; in another slot it gives equal tokens."""
    prompts, requests = batch(ASKS, 5, MAX_MODEL_LEN)
    everyone, _ = finish(BASE, PAIR.params, start_present(BASE, prompts, requests, jnp.ones(4, bool)))
    for group in range(4):
        alone = start_present(BASE, prompts, requests, jnp.arange(4) == group)
        alone, _ = finish(BASE, PAIR.params, alone)
        assert_same_group(everyone, group, alone, group, exact=True)
        assert alone.running.sum() == 0
    order = [2, 0, 3, 1]
    moved = start_present(BASE, *batch([ASKS[i] for i in order], 5, MAX_MODEL_LEN), jnp.ones(4, bool))
    moved, _ = finish(BASE, PAIR.params, moved)
    for slot, group in enumerate(order):
        assert_same_group(everyone, group, moved, slot, exact=False)


def test_absent_groups_leave_finite_memory() -> None:
    """Empty slots go through every forward; they write no NaN anywhere, not even to the trash page."""
    prompts, requests = batch(ASKS, 5, MAX_MODEL_LEN)
    state = start_present(BASE, prompts, requests, jnp.arange(4) == 1)
    state, _ = finish(BASE, PAIR.params, state)
    for leaf in jax.tree.leaves((state.memory.target, state.memory.draft)):
        assert jnp.isfinite(leaf).all()


@pytest.mark.slow
def test_worst_case_bound_of_pages_suffices() -> None:
    """Full prompt pages are shared for good; each row needs at most the rest of the limit's pages for itself.

    Negative control of the bound: a third of the pages changes the answer.
    """
    ask = Ask((1, 2, 3, 1, 2, 3), max_tokens=9, seed=5)
    limit, size, n = ask.limit(MAX_MODEL_LEN), BASE.page_size, BASE.decoding.n_particles
    full = len(ask.prompt) // size
    bound = full + n * (-(-limit // size) - full)

    def finished(pages: int) -> smc.State:
        """The last state of a run that has so many pages."""
        prompts, requests = batch([ask, *ASKS[1:]], 5, MAX_MODEL_LEN)
        return finish(BASE, PAIR.params, start_present(BASE, prompts, requests, jnp.arange(4) == 0, pages))[0]

    roomy, tight, short = (finished(pages) for pages in (99, bound, bound // 3))
    assert_same_group(tight, 0, roomy, 0, exact=True)
    assert not np.allclose(smc.log_evidence(roomy), smc.log_evidence(short), atol=1e-4)
