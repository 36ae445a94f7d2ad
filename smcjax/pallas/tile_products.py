"""Products of a matrix's rows with eight vectors by the tensor core, for programs of single threads (`simt.py`).

A warp takes 16 rows, a tile, and 32 columns at a time, a chunk. A lane loads eight neighbouring columns of two rows and
has the same columns of one vector, so nothing passes through shared memory. The instruction's order of columns is not
theirs in memory, which does not matter to a sum that both factors have in the same order.

Vectors are f32, and each is multiplied as two of bfloat16, its rounding and the rest's (`simt.split_pair`): products
count its first 16 bits, and are added up in f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from smcjax.pallas.simt import WARP, Threads, Word, multiply_tile, split_pair

ROWS = 16  # of a tile
VECTORS = 8
CHUNK = 32  # columns
NEAR = 2  # chunks that are asked for together: lines of 128 bytes


class Factor(NamedTuple):
    """A lane's eight numbers of a vector, in pairs of bfloat16."""

    rounded: list[Word]
    rest: list[Word]


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
    row: Callable[[int, int, int], list[Word]],
    factors: Callable[[], list[Factor]],
    *,
    tiles: int,
    chunks: int,
    ahead: int,
) -> list[list[Word]]:
    """Sums over a warp's columns for each tile, as `simt.multiply_tile` leaves them.

    Lane 4·g + i has those of the tile's row g with vectors 2i and 2i + 1, then of row g + 8.

    Args:
        t: the threads.
        row: loads a lane's eight numbers, as pairs, of a tile, half a tile and a chunk; called once each.
        factors: makes those of the lane's vector, a chunk each; called when the first rows have been asked for.
        tiles: of the warp.
        chunks: of the warp.
        ahead: pairs of rows that a lane waits for together, four words a row.
    """
    order = [
        (tile, chunk)
        for first in range(0, chunks, NEAR)
        for tile in range(tiles)
        for chunk in range(first, min(first + NEAR, chunks))
    ]

    def ask(tile: int, chunk: int) -> tuple[list[Word], list[Word]]:
        return row(tile, 0, chunk), row(tile, 1, chunk)

    waiting = [ask(*place) for place in order[:ahead]]
    of_chunk = factors()
    sums = [[t.constant(0.0)] * 4 for _ in range(tiles)]
    for number, (tile, chunk) in enumerate(order):
        upper, lower = waiting.pop(0)
        for pair in (0, 2):
            a = [upper[pair], lower[pair], upper[pair + 1], lower[pair + 1]]
            for words in of_chunk[chunk]:
                sums[tile] = multiply_tile(t, a, words[pair : pair + 2], sums[tile])
        if number + ahead < len(order):
            waiting.append(ask(*order[number + ahead]))
    return sums
