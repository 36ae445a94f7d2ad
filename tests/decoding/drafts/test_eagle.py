"""EAGLE-3 heads as they draft: from pages, cycle after cycle, they propose what a dense forward over all tokens would.

The oracle reads a row's tokens from the beginning: the target's streams, the head over its features, and from the
frontier on the head's own outputs. So it sees features at the wrong position, entries that the head made of its own
outputs and that were not replaced, and pages that hold another path's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import rejection, smc
from smcjax.decoders import Rejection
from smcjax.decoding import speculation
from smcjax.decoding.distribution import distribution_of
from smcjax.decoding.drafts.eagle import Eagle
from smcjax.decoding.groups import PairParams
from smcjax.kv import KVCache
from smcjax.model import LayerSpec, Rope
from smcjax.model.decoder import AuxHiddenStates, hidden_states
from smcjax.model.eagle import ATTENTION, EagleConfig, EagleParams, eagle_forward, eagle_logits, eagle_shapes, fuse
from smcjax.pallas.dispatch import implementations
from tests import exact
from tests.helpers import Ask, assert_pages_sound, batch, tiny_config, tiny_params
from tests.smc.reference import language_model
from tests.weights import normal

V, MAX_MODEL_LEN, LENGTH, CHUNK = 5, 24, 32, 3
TARGET = tiny_config(V, num_layers=2)
TARGET_PARAMS = tiny_params(TARGET, 1)
AFTER = language_model(TARGET, TARGET_PARAMS, LENGTH)
PRUNED, FULL = (1, 3, 4), None


def head_of(ids: tuple[int, ...] | None, aux_layers: tuple[int, ...] = (0, 1, 2)) -> tuple[Eagle, PairParams]:
    """A head of random weights that drafts these token ids, or all."""
    layer = tiny_config(V, num_layers=1, layers=(LayerSpec(ATTENTION, Rope(100.0)),))
    config = EagleConfig(layer, V if ids is None else len(ids), TARGET.hidden_size, aux_layers)
    leaves, tree = jax.tree.flatten(eagle_shapes(config, jnp.float32))
    keys = jax.random.split(jax.random.key(5), len(leaves))
    weights = [
        jnp.asarray(
            normal(key, leaf.shape) * np.float32(1.5 / np.sqrt(leaf.shape[-1]))
            if len(leaf.shape) > 1
            else 1 + np.float32(0.2) * normal(key, leaf.shape)
        )
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    params: EagleParams = jax.tree.unflatten(tree, weights)
    params = params.joined(30 * TARGET_PARAMS.embed, None)
    if ids is not None:
        params = dataclasses.replace(params, token_ids=jnp.asarray(ids))
    return Eagle(config), PairParams(TARGET_PARAMS, params)


@functools.partial(jax.jit, static_argnums=0)
def _dense_features(eagle: Eagle, params: PairParams, tokens: jax.Array) -> jax.Array:
    positions, aux = jnp.arange(LENGTH)[None], AuxHiddenStates(eagle.aux_layers)

    def attend(index: int, projection: Any) -> jax.Array:
        return TARGET.layer(index).attention.dense(projection, positions)

    with implementations("xla"):
        hidden_states(TARGET, params.target, tokens[None], positions, attend, aux)
        return fuse(params.draft, aux.streams)[0]


@functools.partial(jax.jit, static_argnums=0)
def _dense_outputs(eagle: Eagle, params: PairParams, tokens: jax.Array, features: jax.Array) -> Any:
    x = eagle_forward(eagle.config, params.draft, tokens[None], features[None])
    return x[0], eagle_logits(eagle.config, params.draft, x)[0]


def behind(eagle: Eagle, params: PairParams, tokens: list[int], drafts: list[int]) -> np.ndarray:
    """The head's logits behind the last of `tokens` and each of the drafts."""
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(tokens) + len(drafts)] = [*tokens, *drafts]
    committed = jnp.asarray(np.where(np.arange(LENGTH) < len(tokens), padded, 0))
    features = np.array(_dense_features(eagle, params, committed))
    for last in range(len(tokens) - 1, len(tokens) + len(drafts)):  # position of the token that is behind
        x, logits = _dense_outputs(eagle, params, jnp.asarray(padded[1:]), jnp.asarray(features[:-1]))
        features[last] = x[last - 1]
    return np.asarray(logits)[len(tokens) - 2 : len(tokens) - 1 + len(drafts)]


@functools.partial(jax.jit, static_argnames=("module", "program", "num_pages"))
def init(module: Any, program: Any, params: Any, prompts: Any, requests: Any, num_pages: int) -> Any:
    """begin, prefill in chunks, start; pages begin full of NaN."""
    memory = program.create_memory(params, num_pages)
    blank = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (memory.target, memory.draft))
    memory = dataclasses.replace(memory, target=blank[0], draft=blank[1])
    state = module.begin(program, memory, prompts, requests, requests.prompt_length > 0)
    hidden = jnp.zeros((prompts.shape[0], TARGET.hidden_size))

    def read(number: jax.Array, carried: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, hidden = carried
        return module.prefill(program, params, state, number * CHUNK, CHUNK, hidden)

    state, hidden = jax.lax.fori_loop(0, -(-prompts.shape[1] // CHUNK), read, (state, hidden))
    return module.start(program, params, state, hidden)


ASKS = [
    Ask((1, 2, 3, 0, 4), 14, temperature=0.0),
    Ask((2,), 16, stops=(3,), min_tokens=5, temperature=0.8, seed=2),
    Ask((0, 1) * 3, 12, seed=3),
    Ask((3, 3, 1, 2), 18, seed=5),
    Ask((4, 0), 13, temperature=0.0),
]
TREE = Rejection(tree=(-1, 0, 0, 2, 0, 2, 3), siblings="top", order="dfs")


def drafted(program: Any, params: PairParams, state: Any) -> Any:
    """Returns the drafts of the next step and the logits that it takes for q, which come back processed."""
    distribution = distribution_of(state, rows=program.rows, features=program.features)
    state, copies = speculation.reserve(program, state)
    if program.speculation.tree is not None:
        return speculation.propose_tree(program, params, state, distribution, copies)[1]
    return speculation.propose(program, params, state, distribution, copies, keep_logits=True)[1]


def mistakes(eagle: Eagle, params: PairParams, program: Any, state: Any, drafts: Any) -> float:
    """The largest difference, over live rows, between q as it was drawn from and the oracle's, as probabilities."""
    worst, tree = 0.0, program.speculation.tree
    tokens, length, live = (np.asarray(x) for x in (state.sequences.tokens, state.sequences.length, state.live))
    laws = np.asarray(jax.nn.softmax(drafts.logits))
    for row in np.flatnonzero(live):
        group = row // program.rows
        temperature = float(state.requests.temperature[group]) or 1.0
        generated = length[row] - int(state.requests.prompt_length[group])
        text, proposed = tokens[row, : length[row]].tolist(), np.asarray(drafts.tokens)[row]
        paths: list[tuple[list[int], list[tuple[int, int]]]]
        if tree is None:
            paths = [(proposed[:-1].tolist(), [(depth, depth) for depth in range(len(proposed))])]
        else:
            paths = [
                (proposed[list(tree.paths[node][1 : tree.depths[node] + 1])].tolist(), [(tree.depths[node], place)])
                for place, node in enumerate(tree.inner)
            ]
        for path, places in paths:
            want = behind(eagle, params, text, path)
            for depth, place in places:
                if length[row] - 1 + depth >= int(state.requests.limit[group]):
                    continue  # what would follow is cut off: no KV, and laws that mean nothing
                logits = want[depth] / temperature
                if generated + depth < int(state.requests.min_tokens[group]):
                    logits = np.where(np.asarray(state.requests.stops[group]), -np.inf, logits)
                p = np.exp(logits - logits.max())
                difference = np.abs(laws[row, place] - p / p.sum()).max()
                worst = np.inf if np.isnan(difference) else max(worst, float(difference))
    return worst


def decode(decoding: Rejection, ids: tuple[int, ...] | None = PRUNED, cycles: int = MAX_MODEL_LEN) -> tuple[Any, ...]:
    """The last state, the worst mistake of all cycles, and all accepted lengths."""
    eagle, params = head_of(ids)
    program = rejection.Program(decoding, TARGET, eagle, MAX_MODEL_LEN, 4)
    state = init(rejection, program, params, *batch(ASKS, V, MAX_MODEL_LEN, width=6), 200)
    cycle = jax.jit(lambda params, state: (drafted(program, params, state), *rejection.step(program, params, state)))
    worst, accepted = 0.0, set()
    for _ in range(cycles):
        if not state.running.any():
            break
        drafts, after, info = cycle(params, state)
        worst = max(worst, mistakes(eagle, params, program, state, drafts))
        state = after
        assert_pages_sound(state.sequences.block_table, state.memory.pool)
        accepted |= set(np.asarray(info.accepted)[np.asarray(info.ran)].tolist())
    return state, worst, accepted


@pytest.mark.slow
def test_drafts_are_the_oracles_and_answers_the_targets() -> None:
    """q is the oracle's in every cycle of ragged requests; greedy tokens and log-probabilities are the target's."""
    state, worst, accepted = decode(TREE)
    assert worst < 1e-5
    assert {0, TREE.gamma} <= accepted
    assert not state.failed.any()
    for row, ask in enumerate(ASKS):
        begin, end = len(ask.prompt), int(state.sequences.length[row])
        tokens = np.asarray(state.sequences.tokens)[row, begin:end].tolist()
        plain = dataclasses.replace(ask, temperature=ask.temperature or 1.0)
        laws = [exact.next_law(AFTER, plain, tuple(tokens[:count])) for count in range(len(tokens))]
        logprobs = np.asarray(state.sequences.logprobs)[row, begin:end]
        np.testing.assert_allclose(logprobs, [np.log(law[x]) for law, x in zip(laws, tokens, strict=True)], atol=1e-4)
        if ask.temperature == 0:
            assert tokens == [int(law.argmax()) for law in laws]


@pytest.mark.slow
def test_control_entries_of_own_outputs_stay(patch_programs: Any) -> None:
    """Accepted tokens' entries as the head made them, of its own outputs, are not the oracle's."""

    def copies_alone(
        self: Eagle, speculation: Any, params: Any, groups: Any, copies: Any, *, page_size: int
    ) -> KVCache:
        return groups.memory.draft if copies is None else groups.memory.draft.copy_pages(copies)

    patch_programs(Eagle, "_catch_up", copies_alone)
    assert decode(Rejection(gamma=3), cycles=4)[1] > 1e-2


@pytest.mark.slow
def test_particles_that_fork_draft_from_their_own_path() -> None:
    """Rows are copied often and have unequal lengths: q of each is the oracle's, and log q is that of its drafts."""
    eagle, params = head_of(FULL)
    asks = [
        dataclasses.replace(ask, temperature=ask.temperature or 1.0, seed=seed) for seed, ask in enumerate(ASKS[:3] * 2)
    ]
    program = smc.Program(
        smc.SMC(n_particles=3, gamma=2, control=0.3, ess_threshold=1.0), TARGET, eagle, MAX_MODEL_LEN, 4
    )
    state = init(smc, program, params, *batch(asks, V, MAX_MODEL_LEN, width=6), 300)
    cycle = jax.jit(lambda params, state: (drafted(program, params, state), *smc.step(program, params, state)))
    forked = uneven = 0
    for _ in range(5):
        drafts, after, info = cycle(params, state)
        assert mistakes(eagle, params, program, state, drafts) < 1e-5
        live = np.asarray(state.live)
        logq = np.take_along_axis(
            np.asarray(jax.nn.log_softmax(drafts.logits)), np.asarray(drafts.tokens)[..., None], 2
        )
        np.testing.assert_allclose(np.asarray(drafts.logprobs)[live], logq[..., 0][live], atol=1e-5)
        state = after
        ancestors, length = np.asarray(info.ancestors), np.asarray(info.length)
        forked += int((ancestors != np.arange(3)).sum())
        uneven += int((np.ptp(length, axis=1) > 0).sum())
    assert forked > 4
    assert uneven > 2


def test_smc_refuses_a_head_of_a_part_of_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="an EAGLE-3 head of 3 of the target's 5 token ids, whose drafts leave"):
        smc.Program(smc.SMC(), TARGET, head_of(PRUNED)[0], MAX_MODEL_LEN, 4)


def test_a_target_that_the_head_was_not_made_for_is_refused() -> None:
    with pytest.raises(ValueError, match="5 token ids and hidden size 8, reading layers 0, 1, 3, and the"):
        rejection.Program(Rejection(), TARGET, head_of(FULL, (0, 1, 3))[0], MAX_MODEL_LEN, 4)
