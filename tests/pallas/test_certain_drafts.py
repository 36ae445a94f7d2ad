"""The verdict on certain drafts and its commit in two launches, against whole laws, with the same keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax import rejection
from smcjax.bench.shapes import SHAPES
from smcjax.decoding.distribution import distribution_of
from smcjax.decoding.groups import Groups, Memory
from smcjax.decoding.ngram import NGram
from smcjax.decoding.proposer import Drafts
from smcjax.decoding.sampling import Purpose
from smcjax.decoding.sequences import Requests, Sequences
from smcjax.kv import KVCache, PagePool
from smcjax.pallas.certain_drafts import Asked, Rows, commit_mosaic, supports_certain_drafts
from smcjax.pallas.dispatch import implementations
from smcjax.rejection.decoder import advance

INTERPRET = plgpu.InterpretGPUParams()
TOLERANCE = 1e-5  # of log-probabilities: f32 sums in another order
MAX_LEN, PROMPT = 60, 7
GREEDY, STAYS, CAPPED, BROKEN, BROKEN_BEHIND, MINIMUM, WARM = range(7)  # requests, by what is special in them
_commit = jax.jit(commit_mosaic, static_argnames=("purposes", "interpret"))


@functools.partial(jax.jit, static_argnames="program")
def _advance(program: Any, state: Groups, logits: Any, drafts: Drafts) -> Any:
    return advance.reference(program, state, distribution_of(state, rows=1, truncates=False), logits, drafts)


def program_of(gamma: int, vocab: int, **changes: Any) -> Any:
    config = dataclasses.replace(SHAPES["llama-3.1-8b"], vocab_size=vocab)
    return rejection.Program(rejection.Rejection(gamma), config, NGram(), MAX_LEN, 4, **changes)


def case(groups: int, gamma: int, vocab: int, seed: int) -> tuple[Groups, jax.Array, Drafts]:
    """Requests of which each is special, `groups` at least 7 of them, and drafts that are likely."""
    rng, columns = np.random.default_rng(seed), gamma + 1
    length = rng.integers(PROMPT + 1, 40, groups).astype(np.int32)
    logits = rng.normal(size=(groups, columns, vocab)).astype(np.float32) * 3
    drafts = rng.integers(0, vocab, (groups, gamma)).astype(np.int32)
    likely = rng.random((groups, gamma)) < 0.8
    above = np.where(likely, 14, 8) + np.log(max(1, vocab / 300))  # so that other tokens have no more in all
    np.put_along_axis(logits[:, :gamma], drafts[..., None], above[..., None], axis=2)
    logits[BROKEN, seed % 2, -1] = np.nan  # behind a draft only if that is accepted
    limit, minimum, stops = np.full(groups, MAX_LEN), np.zeros(groups), rng.random((groups, vocab)) < 0.01
    stops[WARM] |= np.isin(np.arange(vocab), drafts[WARM, gamma // 2])  # a draft that may end the request
    limit[CAPPED] = length[CAPPED] + max(1, gamma // 2)
    limit[BROKEN_BEHIND] = length[BROKEN_BEHIND] + 1
    logits[BROKEN_BEHIND, 1:] = np.nan
    minimum[MINIMUM] = length[MINIMUM] - PROMPT + gamma // 2
    stops[MINIMUM] |= rng.random(vocab) < 0.9
    temperature = np.where(np.arange(groups) == WARM, 1.7, 1.0)
    temperature[GREEDY] = 0
    requests = Requests(
        prompt_length=jnp.full(groups, PROMPT, jnp.int32),
        limit=jnp.asarray(limit, jnp.int32),
        min_tokens=jnp.asarray(minimum, jnp.int32),
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.full(groups, vocab, jnp.int32),
        top_p=jnp.ones(groups, jnp.float32),
        stops=jnp.asarray(stops),
        control=jnp.full(groups, -1, jnp.float32),
        key=jax.random.split(jax.random.key(seed), groups),
    )
    running = np.arange(groups) != STAYS
    sequences = dataclasses.replace(
        Sequences.create(groups, max_tokens=MAX_LEN + columns, max_pages=2),
        length=jnp.asarray(length),
        finished=jnp.asarray(~running),
    )
    nothing = Memory(PagePool.create(2), KVCache((), 4))
    cycle = jnp.asarray(rng.integers(1, 9, groups), jnp.int32)
    state = Groups(requests, sequences, cycle, jnp.asarray(running), jnp.zeros(groups, bool), nothing)
    certain = Drafts(jnp.asarray(drafts), jnp.zeros(drafts.shape), certain=True)
    return state, jnp.asarray(logits), certain


def committed(state: Groups, logits: Any, drafts: Drafts, interpret: Any) -> tuple[Any, Any]:
    requests, sequences = state.requests, state.sequences
    asked = Asked(
        jax.random.key_data(requests.key),
        requests.temperature,
        requests.min_tokens,
        requests.prompt_length,
        requests.limit,
        requests.stops,
    )
    before = (sequences.tokens, sequences.logprobs, sequences.length, sequences.finished)
    rows = Rows(*before, state.running, state.failed, state.cycle)
    purposes = (int(Purpose.ACCEPT), int(Purpose.NEXT))
    return _commit(logits, drafts.tokens, asked, rows, purposes=purposes, interpret=interpret)


def check(groups: int, gamma: int, vocab: int, seed: int, interpret: Any) -> np.ndarray:
    """One cycle, by the kernels as by the reference. Returns how many drafts each request has accepted."""
    state, logits, drafts = case(groups, gamma, vocab, seed)
    want_state, want = _advance(program_of(gamma, vocab), state, logits, drafts)
    rows, got = jax.tree.map(np.asarray, committed(state, logits, drafts, interpret))
    ran, sequences = np.asarray(state.running), want_state.sequences
    for name in ("length", "finished"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(sequences, name))
    for name in ("running", "failed", "cycle"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(want_state, name))
    for name in ("ran", "done", "before", "after"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    whole = ran & ~rows.failed
    np.testing.assert_array_equal(got.accepted[whole], np.asarray(want.accepted)[whole])
    for group in np.flatnonzero(whole):
        end, run = rows.length[group], got.after[group] - got.before[group]
        np.testing.assert_array_equal(got.tokens[group, :run], want.tokens[group, :run])
        np.testing.assert_array_equal(rows.tokens[group, :end], sequences.tokens[group, :end])
        np.testing.assert_allclose(rows.logprobs[group, :end], sequences.logprobs[group, :end], atol=TOLERANCE)
    np.testing.assert_array_equal(rows.tokens[~ran], state.sequences.tokens[~ran])
    assert rows.failed[BROKEN] or seed % 2
    assert not np.delete(rows.failed, BROKEN).any()
    assert rows.finished[BROKEN_BEHIND]
    return got.accepted[whole]


@pytest.mark.parametrize(("gamma", "vocab"), [(1, 300), (4, 1024), (8, 2100)])
def test_equals_whole_laws(gamma: int, vocab: int) -> None:
    check(7, gamma, vocab, gamma, INTERPRET)


def test_the_noise_is_each_requests_own() -> None:
    """Control: keys of another cycle draw other tokens."""
    state, logits, drafts = case(7, 4, 600, 0)
    other = dataclasses.replace(state, cycle=state.cycle + 1)
    (_, one), (_, two) = (committed(each, logits, drafts, INTERPRET) for each in (state, other))
    assert (np.asarray(one.tokens) != np.asarray(two.tokens)).any()


def test_what_the_kernels_take() -> None:
    """Scores, several candidates, drafts that are drawn and laws that do not follow logits go to the reference."""
    state, logits, drafts = case(7, 4, 128, 0)
    distribution = distribution_of(state, rows=1, truncates=False)
    drawn = dataclasses.replace(drafts, certain=False, logits=logits[:, :-1])
    truncated = distribution_of(state, rows=1, truncates=True)
    program = program_of(4, 128)
    with implementations("mosaic"):
        assert advance.kernel_for(program, state, distribution, logits, drafts) is not None
        refused = [
            (program, state, distribution, logits, drawn),
            (program, state, truncated, logits, drafts),
            (program_of(4, 128, scores=True), state, distribution, logits, drafts),
        ]
        assert all(advance.kernel_for(*args) is None for args in refused)
    assert not supports_certain_drafts(jnp.zeros((1, 17, 128)), drafts.tokens)
    assert not supports_certain_drafts(logits.astype(jnp.bfloat16), drafts.tokens)


@pytest.mark.parametrize("groups", [1, 8])
def test_lower_to_cuda_in_place(groups: int) -> None:
    """Two launches, and neither tokens nor log-probabilities are gathered, scattered or copied by XLA."""
    vocab, integers = 128256, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    one, flags = integers((groups,)), jax.ShapeDtypeStruct((groups,), jnp.bool_)
    logprobs = jax.ShapeDtypeStruct((groups, 1289), jnp.float32)
    rows = Rows(integers((groups, 1289)), logprobs, one, flags, flags, flags, one)
    asked = Asked(
        jax.ShapeDtypeStruct((groups, 2), jnp.uint32),
        jax.ShapeDtypeStruct((groups,), jnp.float32),
        one,
        one,
        one,
        jax.ShapeDtypeStruct((groups, vocab), jnp.bool_),
    )
    logits = jax.ShapeDtypeStruct((groups, 9, vocab), jnp.float32)
    commit = jax.jit(functools.partial(commit_mosaic, purposes=(1, 2)), donate_argnums=3)
    text = commit.trace(logits, integers((groups, 8)), asked, rows).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    assert text.count("#stablehlo.output_operand_alias<") == 7
    assert "stablehlo.scatter" not in text
    assert "stablehlo.gather" not in text


@pytest.mark.gpu
@pytest.mark.parametrize(("gamma", "vocab"), [(1, 300), (4, 1024), (8, 128256), (15, 151936)])
def test_equals_whole_laws_on_a_gpu(gamma: int, vocab: int) -> None:
    accepted = [check(8, gamma, vocab, seed, None) for seed in range(20)]
    assert 0 < np.mean(accepted[0]) <= gamma
    state, logits, drafts = case(8, gamma, vocab, 0)
    first = jax.tree.map(np.asarray, committed(state, logits, drafts, None))
    for _ in range(50):
        jax.tree.map(
            np.testing.assert_array_equal, jax.tree.map(np.asarray, committed(state, logits, drafts, None)), first
        )
