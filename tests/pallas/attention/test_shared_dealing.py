"""Every task is somebody's, once; and nobody has much more to do than others."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from smcjax.pallas.attention.prefix_plan import Sharing
from smcjax.pallas.attention.shared_dealing import AHEAD, FIELDS, assign_tasks, assignments, skipped_rounds_of


@functools.partial(jax.jit, static_argnames=("in_task", "skipped_rounds"))
def tasks(
    splits: jax.Array, chunks: jax.Array, pieces: jax.Array, *, in_task: int, skipped_rounds: int
) -> tuple[jax.Array, ...]:
    """Returns 16 blocks' counts of chunks and of all tasks [16], and their first 600 chunks and pieces [16, 600]."""

    def of_a_block(index: jax.Array) -> tuple[jax.Array, ...]:
        own = assign_tasks(index, splits, chunks, pieces, in_task=in_task, skipped_rounds=skipped_rounds)
        numbers = jnp.arange(600)
        return own.chunks, own.all, jax.vmap(own.chunk)(numbers), jax.vmap(own.packed_at)(numbers)

    return jax.vmap(of_a_block)(jnp.arange(16))


@given(
    st.integers(1, 16), st.integers(0, 300), st.integers(0, 240), st.sampled_from([1, 4]), st.sampled_from([64, 128])
)
def test_every_task_is_dealt_once_and_evenly(splits: int, chunks: int, pieces: int, in_task: int, width: int) -> None:
    skipped_rounds, packed = skipped_rounds_of(width), -(-pieces // in_task)
    counts = (jnp.int32(count) for count in (splits, chunks, pieces))
    own_chunks, own, chunk_at, packed_at = (
        np.asarray(x)[:splits] for x in tasks(*counts, in_task=in_task, skipped_rounds=skipped_rounds)
    )
    dealt = [chunk_at[i, : own_chunks[i]] for i in range(splits)]
    assert sorted(np.concatenate(dealt)) == list(range(chunks))
    assert all((np.diff(mine) > 0).all() for mine in dealt)
    dealt_pieces = [packed_at[i, own_chunks[i] : own[i]] for i in range(splits)]
    assert sorted(np.concatenate(dealt_pieces)) == list(range(packed))
    assert all(chunk_at[i, 0] == i for i in range(splits))
    if chunks >= (1 + skipped_rounds) * splits or not skipped_rounds:
        weight = own_chunks + (1 + skipped_rounds) * (own - own_chunks)
        assert weight.max() - weight.min() <= 2


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([64, 128]))
def test_kernels_find_an_assignment_and_its_first_chunks(chunks: int, pieces: int, chunk: int) -> None:
    splits, width = (3, 2), chunk // 16 + 2
    rng = np.random.default_rng(chunks)
    sharing = Sharing(
        chunks=jnp.asarray(rng.integers(0, 99, (2, 2, 41, width)), jnp.int32),
        num_chunks=jnp.asarray([[chunks, 3], [0, chunks]], jnp.int32),
        pieces=jnp.zeros((2, 2, 41, 3), jnp.int32),
        num_pieces=jnp.asarray([[pieces, 7], [0, pieces]], jnp.int32),
        rows=4,
        queries=40,
        chunk=chunk,
        piece=16,
    )
    found = np.asarray(jax.jit(assignments, static_argnums=1)(sharing, splits))
    assert found.shape == (2, 5, 4 * -(-(AHEAD * width + len(FIELDS)) // 4))
    for group in range(2):
        for share in range(5):
            part, block = (0, share) if share < 3 else (1, share - 3)
            counts = (x[group, part] for x in (sharing.num_chunks, sharing.num_pieces))
            own = assign_tasks(
                jnp.int32(block), jnp.int32(splits[part]), *counts, in_task=4, skipped_rounds=skipped_rounds_of(chunk)
            )
            ahead, fields, _ = np.split(found[group, share], [AHEAD * width, AHEAD * width + len(FIELDS)])
            assert fields.tolist() == [int(getattr(own, field)) for field in FIELDS]
            for number, first in enumerate(ahead.reshape(AHEAD, width)):
                if number < own.chunks:
                    assert (first == sharing.chunks[group, part, own.chunk(jnp.int32(number))]).all()
                else:
                    assert (first == -1).all()
