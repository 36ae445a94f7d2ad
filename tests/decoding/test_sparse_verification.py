"""Decoders that verify by groups and by schedules of selecting layers: tokens, laws and weights, from a dense oracle.

Under a schedule the target is another model: behind the prompt its second layer takes the blocks that the same query
has selected in the first. The oracle computes that without pages, groups or drafts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from smcjax.decoders import Autoregressive, Rejection
from smcjax.decoding.speculation import reserve, score
from smcjax.model.attention import Projection
from smcjax.model.decoder import hidden_states, unembed
from smcjax.model.view import BatchView
from smcjax.model.visible_kv import SequenceKV
from smcjax.sparse import groups as nsa_groups
from smcjax.sparse import nsa
from smcjax.sparse.routing import Entries
from smcjax.sparse.verification import SparseVerification
from tests import exact
from tests.decoding.test_nsa import (
    DENSE_DRAFT,
    GREEDY,
    MAX_MODEL_LEN,
    NSA_DRAFT,
    PARTICLES,
    SAMPLED,
    TARGET,
    V,
    decode,
    first_rows,
    init,
    pair_of,
    params_of,
    program_of,
    str_of,
)
from tests.helpers import Ask, batch, outputs
from tests.smc import reference

REUSE = (True, False)


@jax.jit
def _logits(tokens: jax.Array, prompt: jax.Array, flags: jax.Array) -> jax.Array:
    """Dense logits; behind the first `prompt` positions, layers whose flag is False take the blocks of earlier ones."""
    positions, params = jnp.arange(tokens.shape[1])[None], params_of(TARGET)
    carried: list[Any] = [False]

    def attend(index: int, projection: Projection) -> jax.Array:
        kind: Any = TARGET.layer(index).attention
        seen = Entries(*map(SequenceKV, kind.entries_without_pages(projection)))
        routed = kind.route(projection, seen, positions, positions)
        selects = flags[index] | (positions < prompt)[..., None, None]
        routed = routed._replace(selected=jnp.where(selects, routed.selected, carried[0]))
        carried[0] = routed.selected
        return kind._attend(projection, seen, positions, positions, routed).gated()

    return unembed(params, hidden_states(TARGET, params, tokens, positions, attend))


@functools.cache
def after(prompt: int, flags: tuple[bool, ...]) -> Any:
    """The logits behind a list of tokens, of which the first `prompt` are the prompt."""

    @functools.cache
    def found(tokens: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((1, MAX_MODEL_LEN + 8), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(_logits(padded, jnp.asarray(prompt), jnp.asarray(flags)))[0, len(tokens) - 1]

    return lambda tokens: found(tuple(tokens))


@functools.cache
def likeliest(ask: Ask, flags: tuple[bool, ...]) -> list[int]:
    tokens = list(ask.prompt)
    for _ in range(ask.max_tokens):
        tokens.append(int(after(len(ask.prompt), flags)(tokens).argmax()))
    return tokens[len(ask.prompt) :]


def checked(decoding: Any, draft: Any, page_size: int) -> None:
    """Greedy tokens are those of the schedule's model, sampled ones' log-probabilities too.

    Control: the likeliest tokens of the model whose layers all select are others.
    """
    asks = [*GREEDY, *SAMPLED]
    state, _ = decode(decoding, draft, asks, page_size)
    for ask, (tokens, logprobs) in zip(asks, first_rows(decoding, asks, state), strict=True):
        if ask.temperature == 0:
            assert tokens == likeliest(ask, REUSE)
        else:
            laws = [exact.next_law(after(len(ask.prompt), REUSE), ask, tuple(tokens[:at])) for at in range(len(tokens))]
            want = [np.log(law[token]) for law, token in zip(laws, tokens, strict=True)]
            np.testing.assert_allclose(logprobs, want, atol=1e-4)
    assert sum(likeliest(ask, REUSE) != likeliest(ask, (True, True)) for ask in GREEDY) >= 3, "control"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoding", "draft", "page_size"),
    [
        (Autoregressive(SparseVerification(schedule=2)), None, 4),
        (Rejection(gamma=2, n_candidates=3, sparse=SparseVerification("merged", 4, "dfs", 2)), NSA_DRAFT, 2),
    ],
    ids=str_of,
)
def test_tokens_are_those_of_the_schedules_model(decoding: Any, draft: Any, page_size: int) -> None:
    checked(decoding, draft, page_size)


@pytest.mark.slow
def test_trees_give_the_tokens_of_the_schedules_model() -> None:
    checked(Rejection(tree=(2, 1, 1), sparse=SparseVerification("merged", 3, "dfs", REUSE)), NSA_DRAFT, 8)


GROUPED = dataclasses.replace(PARTICLES, sparse=SparseVerification("merged", 4, schedule=REUSE))


@pytest.mark.slow
def test_smc_on_the_schedules_model_equals_plain_python() -> None:
    """Merged across particles: every row's tokens and weight are those that plain Python gives it."""
    state, _ = decode(GROUPED, DENSE_DRAFT, SAMPLED, 4)
    of_draft = reference.language_model(DENSE_DRAFT, pair_of(DENSE_DRAFT).draft, MAX_MODEL_LEN + 8)
    rows = outputs(state)
    for group, ask in enumerate(SAMPLED):
        result = reference.decode(PARTICLES, after(len(ask.prompt), REUSE), of_draft, ask, MAX_MODEL_LEN)
        assert rows[group] == [tuple(row.tokens[len(ask.prompt) :]) for row in result.rows]
        np.testing.assert_allclose(state.log_weight[group], [row.log_weight for row in result.rows], atol=1e-4)


@functools.cache
def population() -> Any:
    """Particles that have gone their own ways: eight requests of three, four cycles behind their prompts."""
    program = program_of(GROUPED, DENSE_DRAFT, 4)
    num_pages = len(SAMPLED) * program.rows * (program.max_pages + 2) + 1
    state = init(program, pair_of(DENSE_DRAFT), *batch(SAMPLED, V, MAX_MODEL_LEN), num_pages)
    step = jax.jit(smc.step, static_argnames="program")
    for _ in range(4):
        state, _ = step(program, pair_of(DENSE_DRAFT), state)
    return program, state


DRAFTS = np.random.default_rng(0).integers(0, V, (24, 2)).astype(np.int32)


def scored(sparse: SparseVerification | None, drafts: np.ndarray = DRAFTS) -> np.ndarray:
    """The target's logits [requests, N, C, V] behind drafts for this population, of requests that run."""
    program, state = population()
    decoding = dataclasses.replace(program.decoding, sparse=sparse, approximate=_is_approximate(sparse))
    program = dataclasses.replace(program, decoding=decoding)
    logits = np.asarray(_scored(program, pair_of(DENSE_DRAFT), state, drafts))
    return logits.reshape(8, 3, *logits.shape[1:])[np.asarray(state.running)]


def _is_approximate(sparse: SparseVerification | None) -> bool:
    return sparse is not None and sparse.precision == "approximate"


@functools.partial(jax.jit, static_argnums=0)
def _scored(program: Any, params: Any, state: Any, drafts: Any) -> jax.Array:
    state, copies = reserve(program, state)
    return score(program, params, state, drafts, copies)[1]


@pytest.mark.slow
def test_groups_across_particles_change_nothing() -> None:
    """Nine queries, the columns of three particles, say in one group what each says by itself."""
    got, want = scored(SparseVerification("merged", 9, "position")), scored(None)
    np.testing.assert_allclose(got, want, atol=1e-4)
    np.testing.assert_array_equal(got.argmax(axis=-1), want.argmax(axis=-1))


@pytest.mark.slow
def test_routing_by_groups_changes_nothing(patch_programs: Any) -> None:
    """Compressed tokens read once a group, as kernels do, of particles whose pages resampling has dealt out.

    Control: the first particle's pages for all. (Groups are of sizes that no other test compiles.)
    """
    want, asked, tables = scored(None), [], nsa_groups._tables
    patch_programs(nsa, "routes_by_kernel", lambda *_: not asked.append(1))
    np.testing.assert_allclose(scored(SparseVerification("merged", 8, "dfs")), want, atol=1e-4)
    assert asked

    def of_first(view: BatchView) -> jax.Array:
        found = tables(view)
        return found[np.arange(found.shape[0]) // view.rows * view.rows]

    patch_programs(nsa_groups, "_tables", of_first)
    assert not np.abs(scored(SparseVerification("merged", 7)) - want).max() <= 1e-2


@pytest.mark.slow
def test_shared_blocks_are_strict_for_single_queries_alone() -> None:
    """A group of one is strict; control: groups of four are not."""
    want = scored(None)
    np.testing.assert_allclose(scored(SparseVerification("shared", 1)), want, atol=1e-4)
    assert np.abs(scored(SparseVerification("shared", 4)) - want).max() > 1e-2


@pytest.mark.slow
def test_a_particles_logits_do_not_ask_its_siblings() -> None:
    """Other drafts of the second particle change nothing for the others; control: but they do where blocks are shared,
    since its first draft is the first query of a group."""
    others = DRAFTS.copy()
    others[1::3] = (others[1::3] + 1) % V
    strict, shared = SparseVerification("merged", 9, "position"), SparseVerification("shared", 4)
    np.testing.assert_allclose(scored(strict, others)[:, ::2], scored(strict)[:, ::2], atol=1e-5)
    assert np.abs(scored(shared, others)[:, ::2] - scored(shared)[:, ::2]).max() > 1e-2, "control"
    assert np.abs(scored(strict, others)[:, 1] - scored(strict)[:, 1]).max() > 1e-2, "control"


def test_targets_without_sparse_layers_are_refused() -> None:
    program = program_of(GROUPED, DENSE_DRAFT, 4)
    with pytest.raises(ValueError, match=r"^sparse is about a target's selected blocks and this target has no layer"):
        dataclasses.replace(program, target=DENSE_DRAFT)
