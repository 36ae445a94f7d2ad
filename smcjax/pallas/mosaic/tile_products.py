"""Products of a matrix's rows with eight vectors by the tensor core, for programs of single threads (`threads.py`).

A warp takes 16 rows, a tile, and 32 columns at a time, a chunk. A lane loads eight neighbouring columns of two rows and
has the same columns of one vector, so no thread waits for another; where rows wait in shared memory, so that more are
under way than registers hold, it reads what it has copied itself. The instruction's order of columns is not theirs in
memory, which does not matter to a sum that both factors have in the same order.

Vectors are f32, and each is multiplied as two of bfloat16, its rounding and the rest's (`thread_tiles.split_pair`):
products count its first 16 bits, and are added up in f32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from smcjax.pallas.mosaic.thread_tiles import (
    copy_pairs,
    group_copies,
    load_pairs,
    multiply_tile,
    split_pair,
    wait_for_copies,
)
from smcjax.pallas.mosaic.threads import WARP, WARPGROUP, Ref, Threads, Word

ROWS = 16  # of a tile
VECTORS = 8
CHUNK = 32  # columns
NEAR = 2  # chunks that are asked for together, lines of 128 bytes, and tiles
STAGE = NEAR * NEAR * 2 * 8 * WARPGROUP  # numbers of bfloat16 of a warpgroup's that are asked for together


class Factor(NamedTuple):
    """A lane's eight numbers of a vector, in pairs of bfloat16."""

    rounded: list[Word]
    rest: list[Word]


class Stages(NamedTuple):
    """Shared memory for what is asked for."""

    memory: Ref  # [number · STAGE] bf16
    number: int


def factor(t: Threads, numbers: list[Word]) -> Factor:
    """Eight numbers of f32 as a factor."""
    pairs = [split_pair(t, *numbers[i : i + 2]) for i in range(0, 8, 2)]
    return Factor([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def own_vector(t: Threads) -> Word:
    """The number of the vector that a lane has, and of its row in half a tile."""
    return t.index % WARP // 4


def own_columns(t: Threads) -> Word:
    """The first of a lane's eight columns of a chunk."""
    return t.index % 4 * 8


def tile_products(
    t: Threads,
    matrix: Ref,
    begin: Word,
    offset: Callable[[int, int, int], int],
    factors: Callable[[], list[Factor]],
    *,
    tiles: int,
    chunks: int,
    stages: Stages | None = None,
) -> list[list[Word]]:
    """Sums over a warp's columns for each tile, as `thread_tiles.multiply_tile` leaves them.

    Lane 4·g + i has those of the tile's row g with vectors 2i and 2i + 1, then of row g + 8.

    Args:
        t: the threads.
        matrix: what the rows are of, in GMEM.
        begin: where a lane's first eight numbers are.
        offset: how far from there those of a tile, half a tile and a chunk are.
        factors: makes those of the lane's vector, a chunk each; called when the first rows have been asked for.
        tiles: of the warp.
        chunks: of the warp.
        stages: where rows wait to be multiplied; None: in registers, all of them. All threads of the warpgroup call
            this together then.
    """
    units = [  # of pairs of rows
        [
            (tile, chunk)
            for tile in range(top, min(top + NEAR, tiles))
            for chunk in range(left, min(left + NEAR, chunks))
        ]
        for left in range(0, chunks, NEAR)
        for top in range(0, tiles, NEAR)
    ]
    ahead = len(units) if stages is None else min(stages.number, len(units))
    loaded = []

    def places(number: int, pair: int) -> list[int]:
        first = number % ahead * STAGE + pair * 2 * 8 * WARPGROUP
        return [first, first + 8 * WARPGROUP]

    def ask(number: int) -> None:
        offsets = [[offset(tile, half, chunk) for half in range(2)] for tile, chunk in units[number]]
        if stages is None:
            loaded.append([[load_pairs(t, matrix, begin, one) for one in pair] for pair in offsets])
            return
        for pair, both in enumerate(offsets):
            for place, one in zip(places(number, pair), both, strict=True):
                copy_pairs(t, stages.memory, t.index * 8, place, matrix, begin, one)
        group_copies(t)

    def take(number: int) -> list[list[list[Word]]]:
        if stages is None:
            return loaded[number]
        wait_for_copies(t, min(ahead, len(units) - number) - 1)
        pairs = range(len(units[number]))
        return [[load_pairs(t, stages.memory, t.index * 8, at) for at in places(number, pair)] for pair in pairs]

    for number in range(ahead):
        ask(number)
    of_chunk = factors()
    if stages is not None:
        t.synchronize()  # else the compiler asks for what vectors are made of when the first rows have come
    # Two sums a tile, and tiles in turn: a product waits for the one before it of the same sum.
    sums = [[[t.constant(0.0)] * 4 for _ in Factor._fields] for _ in range(tiles)]
    for number, unit in enumerate(units):
        found = dict(zip(unit, take(number), strict=True))
        turns = sorted(itertools.product(unit, (0, 2)), key=lambda turn: (turn[0][1], turn[1], turn[0][0]))
        for (tile, chunk), pair in turns:
            upper, lower = found[tile, chunk]
            a = [upper[pair], lower[pair], upper[pair + 1], lower[pair + 1]]
            for which, words in enumerate(of_chunk[chunk]):
                sums[tile][which] = multiply_tile(t, a, words[pair : pair + 2], sums[tile][which])
        if number + ahead < len(units):
            ask(number + ahead)
    return [[a + b for a, b in zip(*both, strict=True)] for both in sums]
