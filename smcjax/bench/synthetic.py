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


@cache
def _filling(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns a program that makes Gaussian numbers from a key: on one device or divided among several."""
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=sharding)


def random_memory(memory: Any) -> Any:
    """A decoder's memory with Gaussian numbers in all pages of all layers; the allocator as it was. Consumes it.

    Each array is given up before the one in its place is made, so that memory for one of them is never held twice.
    """
    leaves, treedef = jax.tree.flatten(memory)
    keys = jax.random.split(key_of(2), len(leaves))
    for number, (key, leaf) in enumerate(zip(keys, leaves, strict=True)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            fill = _filling(leaf.shape, leaf.dtype, leaf.sharding)
            leaf.delete()
            leaves[number] = fill(key)
    return jax.tree.unflatten(treedef, leaves)


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def own_pages(state: Any, first: int) -> Any:
    """The state in which every row has pages of its own from its `first`-th on, instead of sharing them.

    Through the allocator, so that every count stays the number of table entries that name the page. What the new
    pages hold is whatever they held: fill the memory before.
    """
    sequences, memory = state.sequences, state.memory
    table = sequences.block_table
    replaced = (jnp.arange(table.shape[1]) >= first)[None] & (table != TRASH)
    pool = release(memory.pool, jnp.where(replaced, table, TRASH))
    pool, fresh = allocate(pool, replaced)
    sequences = dataclasses.replace(sequences, block_table=jnp.where(replaced, fresh, table))
    return dataclasses.replace(state, sequences=sequences).with_memory(pool=pool)
