"""The cut of `prefix_shared.py`'s kernel: parts of a group's queries, shares of their tasks, warpgroups."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from smcjax.device import HOPPER
from smcjax.pallas.mosaic.wgmma import QUERIES

BESIDE = 3 << 10  # bytes of a block's shared memory for barriers and alignment, beside queries and ring
# Of a head's tasks. The merge is unrolled over them, and lowering it takes time by their square: 132 shares took half a
# minute. One request of a model with fewer than four key-value heads leaves multiprocessors idle for that.
MAX_SHARES = 36
MAX_STAGES = 10
MAX_STAGES_WITH_TILES = 3  # where a block has several
NARROW = 1024  # slots of a row's table: in narrower ones there are few chunks, and single rows are read as fast
MAX_TILES_PER_BLOCK = 3


class Registers(NamedTuple):
    """Registers of a thread, when those of the loading warpgroup have been dealt to the others."""

    computing: int
    loading: int

    def hold_queries(self, *, dim: int, chunk: int) -> bool:
        """True where a computing warpgroup's have room for its queries, which products read more cheaply there."""
        needed = dim // 2 + chunk // 2 + dim // 4  # accumulators and scores in f32, queries in bf16
        return needed + OTHER_REGISTERS <= self.computing


REGISTERS = {2: Registers(232, 40), 3: Registers(160, 32), 4: Registers(112, 32)}  # by computing warpgroups
OTHER_REGISTERS = 32  # what the loop needs beside accumulators, scores and queries


def part_of_share(share: jax.Array, splits: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the part that a block's share is of, its number among that part's, and how many these are.

    The `splits` of one part come after those of the other.
    """
    part, index, count = jnp.int32(0), share, jnp.int32(splits[0])
    first = 0
    for p in range(1, len(splits)):
        first += splits[p - 1]
        beyond = share >= first
        part = jnp.where(beyond, p, part)
        index = jnp.where(beyond, share - first, index)
        count = jnp.where(beyond, splits[p], count)
    return part, index, count


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices of the kernel."""

    splits: tuple[int, ...]  # shares of the tasks of each part
    tiles: int = 1  # of 64 queries of a block
    subs: int = 1  # warpgroups that take a lane's tasks in turn
    stages: int = 4  # depth of the ring, in chunks; a multiple of `subs`
    last_tiles: int = 0  # of the last part, where that has fewer

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.tiles * self.subs

    @property
    def shares(self) -> int:
        """Blocks of a group and key-value head."""
        return sum(self.splits)

    @property
    def registers(self) -> Registers | None:
        """Registers of each warpgroup's threads after dealing; None where all keep their own."""
        return REGISTERS.get(self.warpgroups)

    def holds_queries(self, *, dim: int, chunk: int) -> bool:
        """True where a warpgroup has room for its queries in registers, where products read them more cheaply."""
        return self.registers is not None and self.registers.hold_queries(dim=dim, chunk=chunk)


def tiles_of(queries: int) -> int:
    """Tiles of 64 queries in a part, of a group's `queries` for one key-value head: rows · T · H/Hkv.

    As few parts as possible, each with about as many.
    """
    tiles = -(-queries // QUERIES)
    return -(-tiles // -(-tiles // MAX_TILES_PER_BLOCK))


def chunk_of(queries: int, slots: int) -> int:
    """Slots of a chunk, by how many queries a group has for one key-value head and slots its rows' tables.

    Wide ones cost fewer instructions a slot; there must be enough of them for all blocks.
    """
    return 128 if queries > QUERIES and slots > NARROW else 64


def default_tuning(*, groups: int, queries: int, kv_heads: int, dim: int, chunk: int) -> Tuning:
    """Blocks to fill the GPU once, as far as `MAX_SHARES` allows; those of a part with more tiles more."""
    tiles, in_block = -(-queries // QUERIES), tiles_of(queries)
    blocks = min(HOPPER.multiprocessors // (groups * kv_heads), MAX_SHARES)
    work = [min(in_block, tiles - first) for first in range(0, tiles, in_block)]
    splits = [1] * len(work)
    for _ in range(blocks - len(work)):
        busiest = max(range(len(work)), key=lambda p: (work[p] + 1) / splits[p])
        splits[busiest] += 1
    subs = 2 if in_block == 1 else 1
    ring = HOPPER.shared_memory - BESIDE - in_block * subs * QUERIES * dim * 2
    stages = min(MAX_STAGES if in_block == 1 else MAX_STAGES_WITH_TILES, ring // (4 * chunk * dim))
    return Tuning(
        splits=tuple(splits),
        tiles=in_block,
        subs=subs,
        stages=stages // subs * subs,
        last_tiles=work[-1] % in_block,
    )
