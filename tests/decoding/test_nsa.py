"""Decoders on targets and drafts with Native Sparse Attention: they need not know of it, and their laws hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from smcjax import autoregressive, rejection, smc
from smcjax.decoders import Autoregressive, Decoding, Rejection
from smcjax.decoding.groups import PairParams
from smcjax.kv import PagePool, allocate
from smcjax.model import LayerSpec, ModelConfig, Params
from smcjax.sparse.nsa import NSA
from tests import exact
from tests.helpers import Ask, assert_pages_sound, batch, noisy_params, outputs, published, tiny_config, tiny_params
from tests.smc import reference

V, MAX_MODEL_LEN = 5, 30
PAPER = NSA(kernel_size=4, kernel_stride=2, block_size=4, num_blocks=3, window=3, init_blocks=1, local_blocks=1)
SHARED = dataclasses.replace(PAPER, kv="shared", num_blocks=2, block_size=8)
TARGET = tiny_config(V, layers=(LayerSpec(PAPER),), num_kv_heads=1)
NSA_DRAFT = dataclasses.replace(TARGET, layers=(LayerSpec(SHARED),))
DENSE_DRAFT = dataclasses.replace(TARGET, layers=(LayerSpec(),))
CHAIN = Rejection(gamma=3)
CANDIDATES = Rejection(gamma=2, n_candidates=3)
MODULES: dict[type[Decoding], Any] = {Autoregressive: autoregressive, Rejection: rejection, smc.SMC: smc}


def params_of(config: ModelConfig) -> Params:
    """Weights whose next-token laws differ clearly between contexts."""
    params = tiny_params(config, 5)
    layers = zip(params.layers, noisy_params(config).layers, strict=True)
    layers = [
        dataclasses.replace(sharp, attention=noisy.attention, attn_norm=noisy.attn_norm) for sharp, noisy in layers
    ]
    return dataclasses.replace(params, layers=tuple(layers), embed=10 * params.embed)


@functools.cache
def pair_of(draft: ModelConfig | None) -> PairParams:
    """A target, and a draft that has what it can of the target's weights: it is often right, and often wrong."""
    if draft is None:
        return PairParams(params_of(TARGET))
    target, own, (q, kv) = params_of(TARGET), params_of(draft), (8, 4)
    rows = np.r_[:q, q + kv : q + 2 * kv, q + 4 * kv : q + 5 * kv]  # of the selection's keys and values
    layers = [
        dataclasses.replace(theirs, qkv=theirs.qkv[rows], attention=ours.attention)
        for theirs, ours in zip(target.layers, own.layers, strict=True)
    ]
    return PairParams(target, dataclasses.replace(target, layers=tuple(layers)))


after = reference.language_model(TARGET, params_of(TARGET), MAX_MODEL_LEN + 8)


def str_of(value: Any) -> str:
    """A parameter's name in a test's."""
    return {DENSE_DRAFT: "dense draft", NSA_DRAFT: "NSA draft"}.get(value, str(value))


@functools.partial(jax.jit, static_argnames=("program", "num_pages"))
def init(program: Any, params: PairParams, prompts: Any, requests: Any, num_pages: int) -> Any:
    """A population over pages that are full of NaN, prompts read in chunks of 4."""
    module = MODULES[type(program.decoding)]
    memory = program.create_memory(params, num_pages)
    target, draft = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), (memory.target, memory.draft))
    memory = dataclasses.replace(memory, target=target, draft=draft)
    state = module.begin(program, memory, prompts, requests, requests.prompt_length > 0)
    hidden = jnp.zeros((prompts.shape[0], program.target.hidden_size))

    def read(number: jax.Array, carried: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, hidden = carried
        return module.prefill(program, params, state, number * 4, 4, hidden)

    state, hidden = jax.lax.fori_loop(0, -(-prompts.shape[1] // 4), read, (state, hidden))
    return module.start(program, params, state, hidden)


def program_of(decoding: Any, draft: ModelConfig | None, page_size: int) -> Any:
    module = MODULES[type(decoding)]
    return module.Program(decoding, TARGET, draft, MAX_MODEL_LEN, page_size)


def decode(decoding: Any, draft: ModelConfig | None, asks: list[Ask], page_size: int) -> tuple[Any, list[Any]]:
    """The state in which all requests have ended, and what was said of each step; pages are sound after each."""
    return finished(program_of(decoding, draft, page_size), pair_of(draft), asks)


def finished(
    program: Any, params: PairParams, asks: list[Ask], absent: AbstractSet[int] = frozenset()
) -> tuple[Any, list[Any]]:
    """`decode` of a program; requests of these indices are not there."""
    module = MODULES[type(program.decoding)]
    prompts, requests = batch(asks, V, program.max_model_len)
    there = jnp.asarray([index not in absent for index in range(len(asks))])
    requests = dataclasses.replace(requests, prompt_length=jnp.where(there, requests.prompt_length, 0))
    num_pages = len(asks) * program.rows * (program.max_pages + 2) + 1
    state = init(program, params, prompts, requests, num_pages)
    run_step, infos = jax.jit(module.step, static_argnames="program"), []
    while state.running.any():
        state, info = run_step(program, params, state)
        assert_pages_sound(state.sequences.block_table, state.memory.pool)
        infos.append(info)
    assert not state.failed.any()
    _, memory = jax.jit(module.conclude, static_argnames="program")(program, state)
    assert (np.asarray(memory.pool.refcount) == 0).all()
    return state, infos


def first_rows(decoding: Any, asks: list[Ask], state: Any) -> list[tuple[list[int], np.ndarray]]:
    """Generated tokens and their log-probabilities, of each request's first row."""
    found = []
    for group, ask in enumerate(asks):
        row = group * decoding.rows
        at = slice(len(ask.prompt), int(state.sequences.length[row]))
        found.append((state.sequences.tokens[row, at].tolist(), np.asarray(state.sequences.logprobs)[row, at]))
    return found


def greedy(prompt: tuple[int, ...], count: int) -> list[int]:
    """The dense model's own continuation."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(after(tokens).argmax()))
    return tokens[len(prompt) :]


GREEDY = [Ask(tuple((3 * i + i * i // 2) % V for i in range(p)), 30 - p, temperature=0.0) for p in range(1, 11)]
SAMPLED = [Ask((1, 2, 3), 25, seed=1), Ask((2,), 20, temperature=0.8, seed=2), Ask((0, 1) * 4, 12, seed=3)]
SAMPLED += [Ask((3, 1, 4, 1, 3, 2), 24, seed=seed, temperature=2.0) for seed in range(4, 9)]


def test_tokens_are_the_targets() -> None:
    """Greedy from every prompt length mod d and l′, by chunks, single steps and blocks of drafts that end anywhere; and
    the log-probabilities of sampled tokens.

    Whoever read another candidate's keys, a rejected draft's compressed token or a slot of NaN would be far off.
    """
    asks = [*GREEDY, *SAMPLED]
    state, infos = decode(CANDIDATES, DENSE_DRAFT, asks, 1)
    for ask, (tokens, logprobs) in zip(asks, first_rows(CANDIDATES, asks, state), strict=True):
        if ask.temperature == 0:
            assert tokens == greedy(ask.prompt, ask.max_tokens)
        else:
            laws = [exact.next_law(after, ask, tuple(tokens[:at])) for at in range(len(tokens))]
            want = [np.log(law[token]) for law, token in zip(laws, tokens, strict=True)]
            np.testing.assert_allclose(logprobs, want, atol=1e-4)
    accepted = np.concatenate([np.asarray(info.accepted)[np.asarray(info.ran)] for info in infos])
    assert set(accepted.tolist()) == set(range(CANDIDATES.gamma + 1))


PARTICLES = published(3, 2, ess_threshold=1.0)  # resampled in every cycle; 3 tokens a cycle keep no step with pages


def check_smc(decoding: Any, draft: ModelConfig, page_size: int, target: ModelConfig = TARGET) -> None:
    """Every row of SMC is plain Python's."""
    program = dataclasses.replace(program_of(decoding, draft, page_size), target=target)
    state, infos = finished(program, pair_of(draft), SAMPLED)
    assert any(np.asarray(info.resampled).any() for info in infos)
    of_draft = reference.language_model(draft, pair_of(draft).draft, MAX_MODEL_LEN + 8)
    rows = outputs(state)
    for group, ask in enumerate(SAMPLED):
        result = reference.decode(decoding, after, of_draft, ask, MAX_MODEL_LEN)
        assert rows[group] == [tuple(row.tokens[len(ask.prompt) :]) for row in result.rows]
        np.testing.assert_allclose(state.log_weight[group], [row.log_weight for row in result.rows], atol=1e-4)


def company(target: ModelConfig, absent: AbstractSet[int] = frozenset()) -> list[tuple[Any, ...]]:
    """Tokens, log weights and log evidence of each request's particles, the absent left out."""
    program = dataclasses.replace(program_of(PARTICLES, NSA_DRAFT, 16), target=target)
    state, _ = finished(program, pair_of(NSA_DRAFT), SAMPLED, absent)
    weights = zip(np.asarray(state.log_weight).tolist(), np.asarray(smc.log_evidence(state)).tolist(), strict=True)
    groups = zip(outputs(state), weights, strict=True)
    return [group for index, group in enumerate(groups) if index not in absent]


ALL_BUT_ONE = {*range(len(SAMPLED))} - {1}


@pytest.mark.slow
def test_smc_equals_plain_python_in_any_company() -> None:
    """Forks and resampling give every row the keys that it would have alone.

    So a request's particles are the same alone and among others, to the bit, in one program.
    """
    check_smc(PARTICLES, NSA_DRAFT, 16)
    everyone = company(TARGET)
    assert company(TARGET, ALL_BUT_ONE) == everyone[1:2]
    assert company(TARGET, {1}) == [everyone[0], *everyone[2:]]


@pytest.mark.slow
def test_pipelined_smc_equals_plain_python() -> None:
    """Rows share pages of pending blocks; one row writes these tokens and the compressed tokens that they complete."""
    check_smc(dataclasses.replace(PARTICLES, gamma=4, pipelined=True), DENSE_DRAFT, 2)


class OfTheFirst(NSA):
    """All rows of a batch attend to the blocks that its first row selects, as far as they lie behind them."""

    def select(self, scores: Float[Array, "R T S blocks"], positions: Int[Array, "R T"]) -> Any:
        own = positions[:, :, None, None] // self.block_size
        return super().select(scores, positions)[:1] & (jnp.arange(scores.shape[-1])[None, None, None] <= own)


@pytest.mark.slow
def test_control_particles_that_meddle_are_seen() -> None:
    """Both comparisons fail where rows ask others."""
    meddling = dataclasses.replace(TARGET, layers=(LayerSpec(OfTheFirst(**dataclasses.asdict(PAPER))),))
    with pytest.raises(AssertionError):
        check_smc(PARTICLES, NSA_DRAFT, 16, meddling)
    assert company(meddling, ALL_BUT_ONE) != company(meddling)[1:2]


def test_control_counts_that_are_not_the_tables_are_seen() -> None:
    """A page that is counted once too often, and one that is free and in use."""
    pool, table = allocate(PagePool.create(5), jnp.ones((1, 2), bool))
    assert_pages_sound(table, pool)
    counted = dataclasses.replace(pool, refcount=pool.refcount.at[table[0, 0]].add(1))
    given_back = dataclasses.replace(pool, num_free=pool.num_free + 1)
    for wrong in (counted, given_back):
        with pytest.raises(AssertionError):
            assert_pages_sound(table, wrong)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_pages_are_planned_as_large_as_they_are(page_size: int) -> None:
    """Also where a page is shorter than the distance of two compressed tokens."""
    program = program_of(CHAIN, NSA_DRAFT, page_size)
    memory = program.create_memory(pair_of(NSA_DRAFT), num_pages=3)
    taken = sum(array.nbytes for array in jax.tree.leaves((memory.target, memory.draft)))
    assert taken == 3 * program.page_bytes
