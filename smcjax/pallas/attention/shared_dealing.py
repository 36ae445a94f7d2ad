"""Assignment of a part's tasks to its blocks in the kernel of `prefix_shared.py`, so that all take as long.

Of S blocks, block i takes every S-th chunk, then every S-th of those 64 slots into which pieces are packed, of which
some blocks have one more than the others: the last ones, which are the first to have a chunk less. For their masks and
look-ups they take as long as 128 other slots or longer. So where chunks are no wider, those blocks sit out
`skipped_rounds` rounds of chunks, all but the first: chunk i is always block i's, which may so send for it before it
knows how many there are.

Tables change once a cycle, so that is worked out once, by XLA, and all layers' blocks read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from smcjax.pallas.attention.prefix_plan import PACKED, Sharing


def skipped_rounds_of(chunk: int) -> int:
    """Chunks of so many slots that packed pieces take longer than one chunk: of 64, 1.3 measured."""
    return 1 if chunk <= PACKED else 0


class Assignment(NamedTuple):
    """The tasks of one block, by their numbers among its own."""

    block: jax.Array  # i
    splits: jax.Array  # S
    blocks_with_extra_piece: jax.Array  # blocks that have a task of packed pieces more than the others: the last ones
    chunks: jax.Array  # how many it takes
    packed: jax.Array  # how many tasks of packed pieces it takes
    first_packed: jax.Array  # the first of them
    pieces: jax.Array  # how many pieces the part has
    skipped_rounds: int

    @property
    def all(self) -> jax.Array:
        """The number of the block's tasks; chunks come first."""
        return self.chunks + self.packed

    def chunk(self, number: jax.Array) -> jax.Array:
        """Number, in the part, of its `number`-th chunk."""
        turn = jnp.where(
            (self.block >= self.splits - self.blocks_with_extra_piece) & (number > 0),
            number + self.skipped_rounds,
            number,
        )
        return (
            self.block + turn * self.splits - lax.clamp(0, turn - 1, self.skipped_rounds) * self.blocks_with_extra_piece
        )

    def packed_at(self, number: jax.Array) -> jax.Array:
        """Number, among the part's packed pieces, of its `number`-th task, which comes behind its chunks."""
        return self.first_packed + (number - self.chunks) * self.splits


def assign_tasks(
    block: Array, splits: Array, chunks: Array, pieces: Array, *, in_task: int, skipped_rounds: int
) -> Assignment:
    """Assigns a part's `chunks` and `pieces`, `in_task` a task, to one block of `splits`; or to arrays of blocks."""
    packed = -(-pieces // in_task)
    extra_piece = packed % splits
    if skipped_rounds:
        extra_piece = jnp.where(chunks >= (1 + skipped_rounds) * splits, extra_piece, 0)
    first_packed = (block + extra_piece) % splits

    def own(count: Array, place: Array) -> Array:
        """Counts, of `count` things dealt in turn, those of the block in this place."""
        return jnp.maximum((count - place + splits - 1) // splits, 0)

    mine = own(chunks + skipped_rounds * extra_piece, block) - jnp.where(
        block >= splits - extra_piece, skipped_rounds, 0
    )
    return Assignment(block, splits, extra_piece, mine, own(packed, first_packed), first_packed, pieces, skipped_rounds)


FIELDS = ("blocks_with_extra_piece", "chunks", "packed", "first_packed", "pieces")  # those that `assignments` has
AHEAD = 2  # chunks, before them


def assignments(sharing: Sharing, splits: Sequence[int]) -> Int[Array, "G shares F"]:
    """Assignments of all blocks, those of a part behind those of the part before, as one load of a kernel finds them.

    A block's first `AHEAD` chunks as they are in the plan, or -1; its `FIELDS`; zeros, so that all begin at 16 bytes.
    """
    part = np.repeat(np.arange(len(splits)), splits)
    own = assign_tasks(
        jnp.asarray(np.concatenate([np.arange(count) for count in splits]))[None],
        jnp.asarray(np.repeat(splits, splits))[None],
        sharing.num_chunks[:, part],
        sharing.num_pieces[:, part],
        in_task=PACKED // sharing.piece,
        skipped_rounds=skipped_rounds_of(sharing.chunk),
    )
    group = np.arange(own.chunks.shape[0])[:, None]
    ahead = []
    for number in range(AHEAD):
        there = number < own.chunks
        at = jnp.where(there, own.chunk(jnp.int32(number)), 0)
        chunk = sharing.chunks.at[group, part, at].get(mode="promise_in_bounds")
        ahead.append(jnp.where(there[..., None], chunk, -1))
    fields = jnp.stack([getattr(own, field) for field in FIELDS], axis=2).astype(jnp.int32)
    record = jnp.concatenate([*ahead, fields], axis=2)
    return jnp.pad(record, ((0, 0), (0, 0), (0, -record.shape[2] % 4)))
