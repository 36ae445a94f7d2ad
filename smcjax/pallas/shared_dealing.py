"""Which tasks of a part each of its blocks takes in the kernel of `shared_attention.py`, so that all take as long.

Of S blocks, block i takes every S-th chunk, then every S-th of the chunks into which pieces are packed, of which some
blocks have one more than the others. One of those takes as long as more than two of the others, for its masks and
look-ups. So the blocks that have one more, the last ones, sit out `EXTRA` rounds of chunks, all but the first: chunk i
is always block i's, which may so send for it before it knows how many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EXTRA = 1  # how much longer a chunk of pieces takes, in chunks: 1.3 measured


class Dealing(NamedTuple):
    """The tasks of one block, by their numbers among its own."""

    block: jax.Array  # i
    splits: jax.Array  # S
    more: jax.Array  # blocks that have a chunk of pieces more than the others: the last ones
    chunks: jax.Array  # how many it takes
    packed: jax.Array  # how many chunks of pieces it takes

    @property
    def all(self) -> jax.Array:
        """How many tasks it has: chunks first."""
        return self.chunks + self.packed

    def chunk(self, number: jax.Array) -> jax.Array:
        """Which of the part's chunks is its `number`-th."""
        turn = jnp.where((self.block >= self.splits - self.more) & (number > 0), number + EXTRA, number)
        return self.block + turn * self.splits - lax.clamp(0, turn - 1, EXTRA) * self.more

    def chunk_of_pieces(self, number: jax.Array) -> jax.Array:
        """Which of the part's chunks of pieces is its `number`-th task, which comes behind its chunks."""
        return lax.rem(self.block + self.more, self.splits) + (number - self.chunks) * self.splits


def deal(block: jax.Array, splits: jax.Array, chunks: jax.Array, packed: jax.Array) -> Dealing:
    """What one block of `splits` takes of a part's `chunks` and `packed` chunks of pieces."""
    enough = chunks >= (1 + EXTRA) * splits
    more = jnp.where(enough, lax.rem(packed, splits), 0)
    sat_out = jnp.where(block >= splits - more, EXTRA, 0)

    def own(count: jax.Array, place: jax.Array) -> jax.Array:
        """How many of `count` things in turn are those of the block in this place."""
        return lax.max(lax.div(count - place + (splits - 1), splits), 0)

    mine = own(chunks + EXTRA * more, block) - sat_out
    return Dealing(block, splits, more, mine, own(packed, lax.rem(block + more, splits)))
