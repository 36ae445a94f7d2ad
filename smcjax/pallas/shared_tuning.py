"""How the kernel of `shared_attention.py` is cut: parts of a group's queries, shares of their tasks, warpgroups."""

from __future__ import annotations

import dataclasses

from smcjax.pallas.products import QUERIES, STREAMING_MULTIPROCESSORS

SHARED_MEMORY = 224 * 1024  # of a block, for tiles
# Of a head's tasks. The merge is unrolled over them, and lowering it takes time by their square: 132 shares took half a
# minute. One request of a model with fewer than four key-value heads leaves multiprocessors idle for that.
MOST_SHARES = 36
MOST_STAGES = 10
PIPELINED_STAGES = 3  # the same where scores are a chunk ahead: four are 1% slower, five 2%


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices of the kernel."""

    splits: tuple[int, ...]  # shares of the tasks of each part
    tiles: int = 1  # of 64 queries of a block
    subs: int = 1  # warpgroups that take a lane's tasks in turn
    stages: int = 4  # depth of the ring, in chunks; a multiple of `subs`
    last_tiles: int = 0  # of the last part, where that has fewer
    alternates: bool = False  # the last part has one tile, whose tasks the warpgroups take in turn; else one takes all
    pipelined: bool = False  # the next scores are computed during this softmax

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.tiles * self.subs

    @property
    def shares(self) -> int:
        """Blocks of a group and key-value head."""
        return sum(self.splits)


def tiles_of(queries: int) -> int:
    """Tiles of 64 queries in a part, of a group's `queries` for one key-value head: rows · T · H/Hkv."""
    return min(3, -(-queries // QUERIES))


def default_tuning(*, groups: int, queries: int, kv_heads: int, dim: int, chunk: int) -> Tuning:
    """Blocks to fill the GPU once, as far as `MOST_SHARES` allows; those of a part with more tiles more."""
    tiles, in_block = -(-queries // QUERIES), tiles_of(queries)
    blocks = min(STREAMING_MULTIPROCESSORS // (groups * kv_heads), MOST_SHARES)
    work = [min(in_block, tiles - first) for first in range(0, tiles, in_block)]
    splits = [1] * len(work)
    for _ in range(blocks - len(work)):
        busiest = max(range(len(work)), key=lambda p: (work[p] + 1) / splits[p])
        splits[busiest] += 1
    subs = 2 if in_block == 1 else 1
    alternates = work[-1] == 1 < in_block
    in_turn = in_block if alternates else subs  # warpgroups that take tasks in turn
    ring = SHARED_MEMORY - 2 * in_block * subs * QUERIES * dim * 2
    most = MOST_STAGES if in_block == 1 else PIPELINED_STAGES
    stages = min(most, ring // (4 * chunk * dim))
    return Tuning(
        splits=tuple(splits),
        tiles=in_block,
        subs=subs,
        stages=stages // in_turn * in_turn,
        last_tiles=work[-1] % in_block,
        alternates=alternates,
        pipelined=in_block > 1,
    )
