"""A small kernel to try the launch and the interpreter with: y = W · x in one block a row tile, and a running count."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled(x, factor: tl.constexpr):
    return x * factor


@triton.jit
def matrix_times_vector(w, x, count, y, counted, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FACTOR: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    product = tl.load(w + row[:, None] * COLUMNS + column[None, :]).to(tl.float32) * tl.load(x + column)[None, :].to(
        tl.float32
    )
    tl.store(y + row, scaled(tl.sum(product, axis=1), FACTOR))
    slot = counted + tl.program_id(0)
    tl.store(slot, tl.load(count + tl.program_id(0)) + 1)
