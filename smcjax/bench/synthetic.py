"""KV without a prompt's forward: random numbers in the pages, and pages that particles do not share.

A long context's prefill is not what a cycle's benchmark measures. Tables, counts and pages are those that a real
prompt leaves; only where the numbers come from differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from smcjax.kv import TRASH, allocate, release
from smcjax.numerics import key_of


def _normal(key: jax.Array, array: jax.Array) -> jax.Array:
    return jax.random.normal(key, array.shape, array.dtype)


@cache
def _filling(sharding: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Puts Gaussian numbers into an array, which is consumed, where it is: on one device or divided among several."""
    return jax.jit(_normal, donate_argnums=1, out_shardings=sharding)


def random_memory(memory: Any) -> Any:
    """A decoder's memory with Gaussian numbers in all pages of all layers; the allocator as it was. Consumes it."""
    leaves, treedef = jax.tree.flatten(memory)
    keys = jax.random.split(key_of(2), len(leaves))
    filled = [
        _filling(leaf.sharding)(key, leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, filled)


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def own_pages(state: Any, first: int) -> Any:
    """The state in which every row has pages of its own from its `first`-th on, instead of sharing them.

    Through the allocator, so that every count stays the number of table entries that name the page. What the new
    pages hold is whatever they held: fill the memory before.
    """
    sequences, memory = state.sequences, state.memory
    table = sequences.block_table
    replaced = (jnp.arange(table.shape[1]) >= first) & (table != TRASH)
    pool = release(memory.pool, jnp.where(replaced, table, TRASH))
    pool, fresh = allocate(pool, replaced)
    sequences = dataclasses.replace(sequences, block_table=jnp.where(replaced, fresh, table))
    return dataclasses.replace(state, sequences=sequences, memory=dataclasses.replace(memory, pool=pool))
