"""Reads and writes groups of a running batch by their slots, and moves groups to a batch of another size.

A *slot* is a group's place in a decoder's state: entry g of its [G, …] arrays and entries g·N … g·N + N − 1 of its
[R, …] arrays, R = G·N. Memory (KV and pages) belongs to no slot and passes through untouched, so moving a group to
another slot moves integers only. All functions are traced. A slot number of G or more means "no slot".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def take(state: Any, slots: Int[Array, " P"]) -> Any:
    """A state of the P groups in these slots, with the same memory. Entries of "no slot" are undefined."""
    groups = state.running.shape[0]

    def pick(leaf: jax.Array) -> jax.Array:
        return jnp.take(leaf, _entries(slots, leaf.shape[0] // groups), axis=0, mode="clip")

    picked = jax.tree.map(pick, dataclasses.replace(state, memory=None))
    return dataclasses.replace(picked, memory=state.memory)


def put(state: Any, slots: Int[Array, " P"], groups: Any) -> Any:
    """Returns `state` with `groups` written to `slots`, and with the memory of `groups`."""
    size = state.running.shape[0]

    def place(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return leaf.at[_entries(slots, leaf.shape[0] // size)].set(new, mode="drop")

    placed = jax.tree.map(place, *(dataclasses.replace(one, memory=None) for one in (state, groups)))
    return dataclasses.replace(placed, memory=groups.memory)


def _entries(slots: Int[Array, " P"], each: int) -> Int[Array, " Peach"]:
    """The entries of these slots in an array with `each` entries a group."""
    return (slots[:, None] * each + jnp.arange(each)[None]).reshape(-1)
