"""Products of a matrix's rows with few vectors, by single threads (`threads.py`): for kernels that stream weights.

A block of 128 threads takes 256 columns. Each lane of a warp holds eight numbers of every vector and eight of a row at
a time. Sums over the lanes are made for 32 results at once: two lanes exchange halves of their terms, so that each ends
with one result, after 31 shuffles instead of 160.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from smcjax.pallas.mosaic.threads import WARP, WARPS, Threads, Word

COLUMNS = 8 * WARP  # of a block
MAX_VECTORS = 8  # vectors of a block, in registers
AHEAD = 8  # rows that a warp waits for together


def together_of(number: int) -> int:
    """Vectors that a block takes of `number`: a power of two."""
    return next(count for count in (1, 2, 4, 8) if count >= min(number, MAX_VECTORS))


def row_products(
    t: Threads, vectors: list[list[Word]], row: Callable[[Word], list[Word]], rows: int
) -> Iterator[tuple[Word, Word, Word, Word]]:
    """Yields results, one a lane: the vector's number, the row's, their product over the block's columns, f32, and
    true in one of the lanes that have the same.

    Args:
        t: the threads.
        vectors: eight numbers of each, this lane's; 1, 2, 4 or 8 vectors.
        row: loads this lane's eight numbers of a row.
        rows: of all warps; a multiple of 4.
    """
    of_warp, lane = rows // WARPS, t.index % WARP
    first = t.index // WARP * of_warp
    at_once = next(count for count in (32, 16, 8, 4, 2, 1) if count * len(vectors) <= WARP and of_warp % count == 0)
    every = WARP // (len(vectors) * at_once)  # lanes that have one result
    mine = lane // every
    waiting = [row(first + index) for index in range(min(AHEAD, of_warp))]
    for group in range(0, of_warp, at_once):
        sums = [[t.constant(0.0)] * at_once for _ in vectors]
        for j in range(at_once):
            factors = waiting.pop(0)
            if group + j + AHEAD < of_warp:
                waiting.append(row(first + (group + j + AHEAD)))
            for of_vector, x in zip(sums, vectors, strict=True):
                for a, b in zip(x, factors, strict=True):
                    of_vector[j] = t.multiply_add(a, b, of_vector[j])
        total = _folded(t, [one for of_vector in sums for one in of_vector])
        yield mine // at_once, first + group + mine % at_once, total, lane % every == 0


def _folded(t: Threads, terms: list[Word]) -> Word:
    """Sums over a warp of each of up to 32 terms, a power of two: lane i has that of term i · terms // 32."""
    for distance in (16, 8, 4, 2, 1):
        if len(terms) == 1:
            terms = [terms[0] + t.shuffle_xor(terms[0], distance)]
            continue
        upper, half = (t.index // distance) % 2 == 1, len(terms) // 2
        pairs = list(zip(terms[:half], terms[half:], strict=True))
        kept = [t.where(upper, b, a) for a, b in pairs]
        given = [t.where(upper, a, b) for a, b in pairs]
        terms = [mine + t.shuffle_xor(other, distance) for mine, other in zip(kept, given, strict=True)]
    return terms[0]
