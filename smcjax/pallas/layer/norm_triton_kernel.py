"""The Triton functions of `norm_triton.py`."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _inverse_rms(x, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / rms of a row in float32, zeros behind its WIDTH numbers."""
    return tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + EPS)


@triton.jit
def add_rms_norm(
    x,  # [rows, WIDTH]
    y,  # [rows, WIDTH]
    weight,  # [WIDTH], read if WEIGHTED
    total,  # [rows, WIDTH]
    normed,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Adds one row of y to x's and norms the sum."""
    column = tl.arange(0, PADDED)
    is_there = column < WIDTH
    at = tl.program_id(0) * WIDTH + column
    of_x = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    of_y = tl.load(y + at, mask=is_there, other=0.0).to(tl.float32)
    # What is normed is the sum as it goes on, rounded.
    added = (of_x + of_y).to(total.dtype.element_ty)
    tl.store(total + at, added, mask=is_there)
    row = added.to(tl.float32)
    row *= _inverse_rms(row, WIDTH, EPS)
    if WEIGHTED:
        row = row.to(normed.dtype.element_ty).to(tl.float32)  # the reference rounds before the weight and behind it
        row *= tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(normed + at, row.to(normed.dtype.element_ty), mask=is_there)


@triton.jit
def swiglu(
    gate_up,  # [rows, 2·WIDTH]
    x,  # [rows, HIDDEN]
    h,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiplies silu of BLOCK gates of one row by their ups, both divided by rms of x's row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < WIDTH
    column = tl.arange(0, PADDED)
    # All is asked for before the sum waits for x.
    gate = tl.load(gate_up + row * (2 * WIDTH) + place, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + place, mask=is_there, other=0.0).to(tl.float32)
    scale = _inverse_rms(
        tl.load(x + row * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32), HIDDEN, EPS
    )
    gate, up = gate * scale, up * scale
    tl.store(h + row * WIDTH + place, (gate / (1 + tl.exp(-gate)) * up).to(h.dtype.element_ty), mask=is_there)
