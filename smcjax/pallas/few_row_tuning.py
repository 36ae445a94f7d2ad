"""The static side of products of few rows: which sizes `few_row_products.py` takes, and how blocks divide them."""

from __future__ import annotations

import dataclasses

from smcjax.device import HOPPER

ROWS = 64  # of W that the tensor cores multiply at once
DEPTH = 64  # columns of W and x that one product takes: 128 bytes, as they are swizzled
EIGHT = 8  # rows that shared memory keeps together
MOST_OF_W = 256  # rows of W a step
TILE_BYTES = 16 << 10  # of W a step, at most, if it has more than `DEPTH` columns
IN_FLIGHT = 128 << 10  # bytes of W that a block asks for ahead
BESIDE = 4 << 10  # bytes of a block's shared memory for barriers and alignment
# What follows estimates a launch, to choose by: bytes a second, and seconds.
MEMORY = 4.4e12  # that an H200 reads
L2 = 5.2e12  # that all multiprocessors take in together
MEETING = 1e-6  # for two blocks to add up each other's sums


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices of the kernel."""

    rows: int  # results a block has at once: rows of W, with SwiGLU half of them
    tile_k: int  # columns a step
    stages: int  # depth of the ring, in steps
    split: int = 1  # blocks that divide the columns: a cluster, if more than one
    passes: int = 1  # times that a block goes over the columns, for other rows each
    evict_first: bool = True  # lines of W leave the L2 before others
    stagger: bool = True  # blocks begin at different columns, so that they do not ask for the same lines at once

    def blocks(self, outputs: int) -> int:
        """Blocks along W's rows."""
        return -(-outputs // (self.rows * self.passes))


def tiles_of(rows: int) -> tuple[int, ...]:
    """First rows of the tiles of 64 that cover as many: the last may begin early, one alone may end late."""
    return tuple(min(first, max(0, rows - ROWS)) for first in range(0, rows, ROWS))


def padded(rows: int) -> int:
    """Rows of x that are multiplied."""
    return EIGHT * -(-rows // EIGHT)


def shared_memory(tuning: Tuning, rows: int, parts: int) -> int:
    """Bytes a block."""
    tokens = padded(rows)
    w = (tuning.stages * tuning.rows * parts + ROWS) * tuning.tile_k * 2
    x = (tuning.stages * tuning.tile_k // DEPTH * tokens + ROWS) * DEPTH * 2
    sums = (parts * len(tiles_of(tuning.rows)) + parts - 1) * ROWS * tokens * 4
    return w + x + sums + tuning.rows * tokens * 4 + BESIDE


def objection(tuning: Tuning, rows: int, outputs: int, columns: int, parts: int = 1) -> str | None:
    """Why a tuning does not apply to these sizes, as `default_tuning` names them, if it does not."""
    if tuning.rows % EIGHT or not 0 < tuning.rows <= outputs:
        return f"{tuning.rows} rows are no multiple of {EIGHT} up to {outputs}"
    if outputs % EIGHT:
        return f"{outputs} outputs are no multiple of {EIGHT}"
    if tuning.rows * parts > MOST_OF_W:
        return f"{tuning.rows * parts} rows of W are more than {MOST_OF_W}"
    if tuning.tile_k % DEPTH or columns % (tuning.tile_k * tuning.split):
        return f"{columns} columns are no multiple of {tuning.split} · {tuning.tile_k}"
    if tuning.split not in (1, 2) or (tuning.split > 1 and tuning.passes > 1):
        return f"{tuning.split} blocks do not divide columns in {tuning.passes} passes"
    if tuning.blocks(outputs) * tuning.split > HOPPER.multiprocessors:
        return f"{tuning.blocks(outputs)} · {tuning.split} blocks do not run at the same time"
    if shared_memory(tuning, rows, parts) > HOPPER.shared_memory:
        return f"{shared_memory(tuning, rows, parts)} bytes of shared memory"
    return None


def default_tuning(rows: int, outputs: int, columns: int, parts: int = 1) -> Tuning:
    """The tuning whose launch is estimated to be the shortest.

    Args:
        rows: of x.
        outputs: results of each of these rows.
        columns: of W and x.
        parts: rows of W that make a result: 1, or 2 with SwiGLU.

    Raises:
        ValueError: if none applies.
    """

    def seconds(tuning: Tuning) -> float:
        blocks = tuning.blocks(outputs)
        of_w, of_x = (2 * columns * blocks * tuning.passes * each for each in (tuning.rows * parts, rows))
        return max(of_w / MEMORY, (of_w + of_x) / L2) + MEETING * (tuning.split - 1)

    choices = [tuning for split in (1, 2) if (tuning := _of_split(split, rows, outputs, columns, parts)) is not None]
    if not choices:
        raise ValueError(f"no tuning for x [{rows}, {columns}] and {outputs} outputs")
    return min(choices, key=seconds)


def _of_split(split: int, rows: int, outputs: int, columns: int, parts: int) -> Tuning | None:
    """Blocks that all have as many rows, and as wide and as many tiles as fit."""
    share = -(-outputs // (EIGHT * (HOPPER.multiprocessors // split)))  # eights of rows a block
    passes = -(-share * EIGHT * parts // MOST_OF_W)
    height = EIGHT * -(-share // passes)
    for tile_k in (256, 128, 64):
        size = height * parts * tile_k * 2
        if size > TILE_BYTES and tile_k > DEPTH:
            continue
        steps = columns // (tile_k * split) * passes
        for stages in range(min(steps, max(2, IN_FLIGHT // size)), 0, -1):
            tuning = Tuning(height, tile_k, stages, split=split, passes=passes)
            if objection(tuning, rows, outputs, columns, parts) is None:
                return tuning
    return None
