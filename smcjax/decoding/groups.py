"""The device state that every decoder begins with: requests in flight, their rows, and the memory they share."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from smcjax.decoding.sequences import Requests, Sequences
from smcjax.kv import KVCache, PagePool, release
from smcjax.model.params import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairParams:
    """Weights of the target and of the proposer: a draft's `Params`, or None where drafts need none."""

    target: Params
    draft: Any = None
    peer_memory: Any = None  # `smcjax.pallas.PeerMemory` of several devices; None: XLA's collectives


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """The pages of the target and of the proposer under one allocator; they outlive a batch of requests."""

    pool: PagePool
    target: KVCache
    draft: Any = None  # the proposer's own, by its `create_memory`
    automata: Any = None  # `smcjax.decoding.constraints.AutomatonTables`, within programs that read them; else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """G groups of N rows in flight, R = G·N. Rows of a group are consecutive."""

    requests: Requests
    sequences: Sequences
    cycle: Int[Array, " G"]  # the group's own: 0 draws its first token
    running: Bool[Array, " G"]  # a group that is not is frozen
    failed: Bool[Array, " G"]  # ended because its numbers were no law
    memory: Memory

    @property
    def rows(self) -> int:
        """N."""
        return self.sequences.length.shape[0] // self.running.shape[0]

    @property
    def leaders(self) -> Sequences:
        """The first row of each group."""
        return jax.tree.map(lambda x: x[:: self.rows], self.sequences)

    @property
    def live(self) -> Bool[Array, " R"]:
        """Rows that a cycle advances."""
        return self.per_row(self.running) & ~self.sequences.finished

    def per_row(self, per_group: Array) -> Array:
        """A [G, …] array repeated for every row: [R, …]."""
        return jnp.repeat(per_group, self.rows, axis=0)

    def by_group(self, rows: Array) -> Array:
        """An [R, …] array as [G, N, …]."""
        return rows.reshape(self.running.shape[0], -1, *rows.shape[1:])

    def with_memory(self, **fields: Any) -> Self:
        """These groups with other fields of their memory."""
        return dataclasses.replace(self, memory=dataclasses.replace(self.memory, **fields))

    def release(self) -> Memory:
        """The memory with every page of these groups given back."""
        pool = release(self.memory.pool, self.sequences.block_table)
        return dataclasses.replace(self.memory, pool=pool)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info:
    """The report of one cycle that every decoder gives. Where `ran` is false the rest is stale."""

    ran: Bool[Array, " G"]
    done: Bool[Array, " G"]  # no longer running
    tokens: Int[Array, "G N C"]  # each row's block before resampling; what lies behind the row's end is not part of it
    length: Int[Array, "G N"]  # after resampling
    # `smcjax.decoding.scores.Scores` [G, N, C] of `tokens`; None where the program is not asked for them.
    scores: Any = dataclasses.field(default=None, kw_only=True)
