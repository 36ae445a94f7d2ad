"""The static side of products of few rows: which sizes `skinny_gemm.py` takes, and how blocks divide them."""

from __future__ import annotations

import dataclasses

from smcjax.device import HOPPER

ROWS = 64  # of W that the tensor cores multiply at once
SWIZZLED = 128  # bytes of a row of W and x that one product takes
EIGHT = 8  # rows that shared memory keeps together
BESIDE = 4 << 10  # bytes of a block's shared memory for barriers and alignment
# What an H200 was fastest with (dev/LOG.md): deeper rings take from other blocks, narrower tiles wait.
MAX_W_ROWS = 128  # rows of W a step
WIDEST = 256  # columns a step
TILE_BYTES = 32 << 10  # of W a step
STAGES = 4  # of the ring, or more where tiles are small
LEAST = 3  # stages; with fewer, narrower tiles are better
IN_FLIGHT = 64 << 10  # bytes of W that a block then asks for ahead


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices of the kernel."""

    rows: int  # results a consumer has at once: rows of W, with SwiGLU half of them
    tile_k: int  # columns a step
    stages: int  # depth of the ring, in steps
    passes: int = 1  # times that a block goes over the columns, for other rows each
    consumers: int = 1  # warpgroups of a block that multiply

    @property
    def block_rows(self) -> int:
        """Results that a block has at once."""
        return self.rows * self.consumers

    def blocks(self, outputs: int) -> int:
        """Blocks along W's rows."""
        return -(-outputs // (self.block_rows * self.passes))


def tiles_of(rows: int) -> tuple[int, ...]:
    """First rows of the tiles of 64 that cover as many: the last may begin early, one alone may end late."""
    return tuple(min(first, max(0, rows - ROWS)) for first in range(0, rows, ROWS))


def depth(size: int) -> int:
    """Columns of W and x that one product takes, of numbers of `size` bytes."""
    return SWIZZLED // size


def padded(rows: int) -> int:
    """Rows of x that are multiplied."""
    return EIGHT * -(-rows // EIGHT)


def shared_memory(tuning: Tuning, rows: int, parts: int, size: int) -> int:
    """Bytes a block."""
    tokens = padded(rows)
    w = (tuning.stages * tuning.block_rows * parts + ROWS) * tuning.tile_k * size
    x = (tuning.stages * tuning.tile_k // depth(size) * tokens + ROWS) * SWIZZLED
    sums = (parts * len(tiles_of(tuning.rows)) + (parts == 2 and size == 2)) * ROWS
    added = tuning.rows if parts == 1 else 0
    return w + x + tuning.consumers * (sums + added) * tokens * 4 + BESIDE


def objection(tuning: Tuning, rows: int, outputs: int, columns: int, parts: int = 1, size: int = 2) -> str | None:
    """Why a tuning does not apply to these sizes, as `default_tuning` names them, if it does not."""
    if tuning.rows % EIGHT or not 0 < tuning.block_rows <= outputs:
        return f"{tuning.rows} rows are no multiple of {EIGHT} up to {outputs}"
    if outputs % EIGHT:
        return f"{outputs} outputs are no multiple of {EIGHT}"
    if tuning.rows * parts > 2 * MAX_W_ROWS:
        return f"{tuning.rows * parts} rows of W are more than {2 * MAX_W_ROWS}"
    if tuning.tile_k % depth(size) or columns % tuning.tile_k:
        return f"{columns} columns are no multiple of {tuning.tile_k}"
    if tuning.blocks(outputs) > HOPPER.multiprocessors:
        return f"{tuning.blocks(outputs)} blocks do not run at the same time"
    if (needed := shared_memory(tuning, rows, parts, size)) > HOPPER.shared_memory:
        return f"{needed} bytes of shared memory"
    return None


def default_tuning(rows: int, outputs: int, columns: int, parts: int = 1, size: int = 2) -> Tuning:
    """The tuning by which blocks have equal shares of W's rows, and tiles as wide and rings as deep as fit.

    Args:
        rows: of x.
        outputs: results of each of these rows.
        columns: of W and x.
        parts: rows of W that make a result: 1, or 2 with SwiGLU.
        size: bytes of a number of W and x. Of one byte, matrices of several tiles a block have two consumers, each with
            one tile of each part at once.

    Raises:
        ValueError: if none applies.
    """
    share = -(-outputs // (EIGHT * HOPPER.multiprocessors))  # eights of rows a block
    consumers = 2 if size == 1 and share * EIGHT * parts > ROWS else 1
    most = ROWS * consumers if size == 1 else MAX_W_ROWS // parts  # results a block has at once
    passes = -(-share * EIGHT // most)
    height = EIGHT * -(-share // (passes * consumers))
    tile_bytes = height * consumers * parts * size  # of W, of a column
    for tile_k in (WIDEST, WIDEST // 2, WIDEST // 4):
        if tile_k > depth(size) and (columns % tile_k or tile_bytes * tile_k > TILE_BYTES):
            continue
        stages = min(max(STAGES, IN_FLIGHT // (tile_bytes * tile_k)), columns // tile_k * passes)
        tuning = Tuning(height, tile_k, max(1, stages), passes, consumers)
        while tuning.stages > 2 and shared_memory(tuning, rows, parts, size) > HOPPER.shared_memory:
            tuning = dataclasses.replace(tuning, stages=tuning.stages - 1)
        if tuning.stages >= LEAST or tile_k == depth(size):
            break
    reason = objection(tuning, rows, outputs, columns, parts, size)
    if reason:
        raise ValueError(f"no tuning for x [{rows}, {columns}] and {outputs} outputs: {reason}")
    return tuning
