"""Every task is somebody's, once; and nobody has much more to do than others."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given

from smcjax.pallas.shared_dealing import deal, extra_of


@functools.partial(jax.jit, static_argnames="extra")
def tasks(splits: jax.Array, chunks: jax.Array, packed: jax.Array, *, extra: int) -> tuple[jax.Array, ...]:
    """Of 16 blocks, the first 400 numbers each: how many are its own, which chunks and chunks of pieces they are."""

    def of_a_block(index: jax.Array) -> tuple[jax.Array, ...]:
        own = deal(index, splits, chunks, packed, extra=extra)
        numbers = jnp.arange(400)
        return own.chunks, own.all, jax.vmap(own.chunk)(numbers), jax.vmap(own.packed_at)(numbers)

    return jax.vmap(of_a_block)(jnp.arange(16))


@given(st.integers(1, 16), st.integers(0, 300), st.integers(0, 60), st.sampled_from([64, 128]))
def test_every_task_is_dealt_once_and_evenly(splits: int, chunks: int, packed: int, width: int) -> None:
    extra = extra_of(width)
    own_chunks, own, chunk_at, packed_at = (
        np.asarray(x)[:splits] for x in tasks(jnp.int32(splits), jnp.int32(chunks), jnp.int32(packed), extra=extra)
    )
    dealt = [chunk_at[i, : own_chunks[i]] for i in range(splits)]
    assert sorted(np.concatenate(dealt)) == list(range(chunks))
    assert all((np.diff(mine) > 0).all() for mine in dealt)
    dealt_pieces = [packed_at[i, own_chunks[i] : own[i]] for i in range(splits)]
    assert sorted(np.concatenate(dealt_pieces)) == list(range(packed))
    assert all(chunk_at[i, 0] == i for i in range(splits))
    if chunks >= (1 + extra) * splits or not extra:
        weight = own_chunks + (1 + extra) * (own - own_chunks)
        assert weight.max() - weight.min() <= 2
