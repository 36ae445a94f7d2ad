"""Groups of a running batch, by their lanes: taken out, put in, moved to a batch of another size.

A *lane* is a group's place in a decoder's state: entry g of its [G, …] arrays and entries g·N … g·N + N − 1 of its
[R, …] arrays, R = G·N. Memory (KV and pages) belongs to no lane and passes through untouched, so a group that
changes its lane moves integers only. All functions are traced; a lane of G or beyond stands for none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def take(state: Any, lanes: Int[Array, " P"]) -> Any:
    """A state of the P groups in these lanes, with the same memory. What stands for no lane means nothing."""
    groups = state.running.shape[0]

    def pick(leaf: jax.Array) -> jax.Array:
        return jnp.take(leaf, _entries(lanes, leaf.shape[0] // groups), axis=0, mode="clip")

    return _with_memory(jax.tree.map(pick, _without_memory(state)), state.memory)


def put(state: Any, lanes: Int[Array, " P"], groups: Any) -> Any:
    """`state` with these P groups in their lanes and with their memory."""
    size = state.running.shape[0]

    def place(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return leaf.at[_entries(lanes, leaf.shape[0] // size)].set(new, mode="drop")

    placed = jax.tree.map(place, _without_memory(state), _without_memory(groups))
    return _with_memory(placed, groups.memory)


def _entries(lanes: Int[Array, " P"], each: int) -> Int[Array, " Peach"]:
    """The entries of these lanes in an array with `each` entries a group."""
    return (lanes[:, None] * each + jnp.arange(each)).reshape(-1)


def _without_memory(state: Any) -> Any:
    return dataclasses.replace(state, memory=None)


def _with_memory(state: Any, memory: Any) -> Any:
    return dataclasses.replace(state, memory=memory)
