"""x · Wᵀ of few rows of x, W [outputs, columns] read once: Triton.

    y[m, n] = Σₖ x[m, k] · W[n, k]   · of_x[m] · of_w[n]   + add_to[m, n]

A block has TILE_OUTPUTS rows of W and passes over their columns, or over its share of them. W is on the long side of
the tensor cores and x on the short one, as tokens are few: sums are [outputs, rows] and are stored transposed.

A matrix of too few rows to keep a GPU busy is divided along its columns as well. Blocks then leave their sums in
float32, [shares, rows, outputs]. The block that is the last one of a tile to do so adds them up, in the order of the
shares whichever block that is.

Rows of x that are multiplied in float8 are rounded by a launch of their own, a row a block: `rounded`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_of_x(x, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """x[row, column]ᵀ, zeros where there is no such row or column."""
    is_there = (row < ROWS)[None, :]
    if COLUMNS % TILE_COLUMNS:
        is_there = is_there & (column < COLUMNS)[:, None]
    return tl.load(x + row[None, :] * COLUMNS + column[:, None], mask=is_there, other=0.0)


@triton.jit
def _tile_of_w(rows_of_w, column, COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """W[row, column] by pointers to its rows, zeros where there is no such column; no other block reads it again."""
    if COLUMNS % TILE_COLUMNS:
        is_there = (column < COLUMNS)[None, :]
        return tl.load(rows_of_w[:, None] + column[None, :], mask=is_there, other=0.0, eviction_policy="evict_first")
    return tl.load(rows_of_w[:, None] + column[None, :], eviction_policy="evict_first")


@triton.jit
def _rows_of_w(w, output, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, TILE_OUTPUTS: tl.constexpr):
    """Pointers to rows of W; behind the last row they point to the last one again, whose sums are not stored twice."""
    if OUTPUTS % TILE_OUTPUTS:
        output = tl.minimum(output, OUTPUTS - 1)
    return w + output.to(tl.int64) * COLUMNS


@triton.jit
def _finished(
    sums, of_x, of_w, add_to, row, output, is_there, OUTPUTS: tl.constexpr, SCALES_X: tl.constexpr,
    SCALES_W: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    """Sums with their scales, plus what they are added to; `row` and `output` are indices that broadcast to them."""
    if SCALES_X:
        sums *= tl.load(of_x + row, mask=is_there, other=0.0)
    if SCALES_W:
        sums *= tl.load(of_w + output, mask=is_there, other=0.0)
    if ADDS:
        sums += tl.load(add_to + row * OUTPUTS + output, mask=is_there, other=0.0).to(tl.float32)
    return sums


@triton.jit
def _store(
    y, sums, of_x, of_w, add_to, row, output, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SCALES_X: tl.constexpr,
    SCALES_W: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    """Stores results of sums [outputs, rows] over all columns."""
    row, output = row[None, :], output[:, None]
    is_there = (row < ROWS) & (output < OUTPUTS)
    sums = _finished(sums, of_x, of_w, add_to, row, output, is_there, OUTPUTS, SCALES_X, SCALES_W, ADDS)
    tl.store(y + row * OUTPUTS + output, sums.to(y.dtype.element_ty), mask=is_there)


@triton.jit
def _leave(shares, sums, row, output, share, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Stores sums [outputs, rows] over a share of the columns."""
    row, output = row[None, :], output[:, None]
    is_there = (row < ROWS) & (output < OUTPUTS)
    tl.store(shares + (share * ROWS + row) * OUTPUTS + output, sums, mask=is_there)


@triton.jit
def _added_up(
    shares, row, output, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SHARES: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr
):  # fmt: skip
    """Sums [outputs, rows] of all shares, which other multiprocessors have written: read from the L2."""
    row, output = row[None, :], output[:, None]
    is_there = (row < ROWS) & (output < OUTPUTS)
    sums = tl.zeros((TILE_OUTPUTS, TILE_ROWS), tl.float32)
    for share in tl.static_range(SHARES):
        at = shares + (share * ROWS + row) * OUTPUTS + output
        sums += tl.load(at, mask=is_there, other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def skinny_product(
    x,  # [ROWS, COLUMNS]
    w,  # [OUTPUTS, COLUMNS], of x's dtype or int8
    of_x,  # [ROWS] f32, read if SCALES_X
    of_w,  # [OUTPUTS] f32, read if SCALES_W
    add_to,  # [ROWS, OUTPUTS], read if ADDS
    arrived,  # int32, zeros, one a tile: with several shares only, like the last
    y,  # [ROWS, OUTPUTS]
    shares,  # [SHARES, ROWS, OUTPUTS] f32
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # of x: a power of two
    MORE_ROWS: tl.constexpr,  # of x, which follow: 0 or a power of two
    TILE_OUTPUTS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    SHARES: tl.constexpr,
    SCALES_X: tl.constexpr,
    SCALES_W: tl.constexpr,
    ADDS: tl.constexpr,
    SUMMED_INSIDE: tl.constexpr,  # products of float8 that tensor cores sum in fewer bits than float32; None: all
):
    # Blocks of the same rows of W follow each other, so that the second finds them in the L2.
    share = tl.program_id(2)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    first_row = tl.program_id(0) * (TILE_ROWS + MORE_ROWS)
    row = first_row + tl.arange(0, TILE_ROWS)
    rows_of_w = _rows_of_w(w, output, OUTPUTS, COLUMNS, TILE_OUTPUTS)
    # 72 rows are 64 and 16: one tile of them would be 128, of which the tensor cores would multiply 56 for nothing.
    sums = tl.zeros((TILE_OUTPUTS, TILE_ROWS), tl.float32)
    if MORE_ROWS:
        more_row = first_row + TILE_ROWS + tl.arange(0, MORE_ROWS)
        more_sums = tl.zeros((TILE_OUTPUTS, MORE_ROWS), tl.float32)

    # The block's steps along the columns. The compiler fetches those to come while the tensor cores multiply.
    steps: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    for step in range(share * steps // SHARES, (share + 1) * steps // SHARES):
        column = step * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        tile = _tile_of_w(rows_of_w, column, COLUMNS, TILE_COLUMNS)
        of_rows = _tile_of_x(x, row, column, ROWS, COLUMNS, TILE_COLUMNS)
        if MORE_ROWS:
            of_more = _tile_of_x(x, more_row, column, ROWS, COLUMNS, TILE_COLUMNS)
        tile = tile.to(x.dtype.element_ty)  # whole numbers of eight bits, which bfloat16 has all
        sums = tl.dot(tile, of_rows, sums, input_precision="ieee", max_num_imprecise_acc=SUMMED_INSIDE)
        if MORE_ROWS:
            more_sums = tl.dot(tile, of_more, more_sums, input_precision="ieee", max_num_imprecise_acc=SUMMED_INSIDE)

    if SHARES == 1:
        _store(y, sums, of_x, of_w, add_to, row, output, ROWS, OUTPUTS, SCALES_X, SCALES_W, ADDS)
        if MORE_ROWS:
            _store(y, more_sums, of_x, of_w, add_to, more_row, output, ROWS, OUTPUTS, SCALES_X, SCALES_W, ADDS)
    else:
        _leave(shares, sums, row, output, share, ROWS, OUTPUTS)
        if MORE_ROWS:
            _leave(shares, more_sums, more_row, output, share, ROWS, OUTPUTS)
        # All threads have stored before one of them counts the block. Counting releases what they stored, and acquires
        # what the blocks counted before have: the last one sees all shares. It leaves 0, as it found it.
        tl.debug_barrier()
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SHARES - 1:
            sums = _added_up(shares, row, output, ROWS, OUTPUTS, SHARES, TILE_ROWS, TILE_OUTPUTS)
            _store(y, sums, of_x, of_w, add_to, row, output, ROWS, OUTPUTS, SCALES_X, SCALES_W, ADDS)
            if MORE_ROWS:
                more_sums = _added_up(shares, more_row, output, ROWS, OUTPUTS, SHARES, MORE_ROWS, TILE_OUTPUTS)
                _store(y, more_sums, of_x, of_w, add_to, more_row, output, ROWS, OUTPUTS, SCALES_X, SCALES_W, ADDS)
            tl.store(arrived + tile, 0)


@triton.jit
def rounded(
    x,  # [rows, WIDTH]
    weight,  # [WIDTH] of the norm
    values,  # [rows, WIDTH] float8
    scale,  # [rows] f32
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EPS: tl.constexpr,  # of the norm; None: there is none
):
    """Rounds one row, perhaps normed, to float8 by its largest magnitude, as `Quantization.round` does."""
    row = tl.program_id(0)
    x += row.to(tl.int64) * WIDTH
    values += row.to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    # The row's largest magnitude. What is not a number stays one below, whatever the scale.
    most = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        number = tl.load(x + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        squares += number * number
        if WEIGHTED:
            number *= tl.load(weight + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(number))
    of_row = tl.max(most, axis=0) * (1 / LARGEST)  # as XLA divides by a constant
    of_row = tl.where(of_row > 0, of_row, 1.0)
    if EPS is None:
        tl.store(scale + row, of_row)
    else:  # the rest of the norm is a factor of the row's products
        tl.store(scale + row, of_row * tl.rsqrt(tl.sum(squares, axis=0) * (1 / WIDTH) + EPS))
    # The row again, from the L1. A quotient that was rounded beyond the largest number would be no number in float8.
    for start in tl.static_range(0, WIDTH, BLOCK):
        is_there = start + column < WIDTH
        number = tl.load(x + start + column, mask=is_there, other=0.0).to(tl.float32)
        if WEIGHTED:
            number *= tl.load(weight + start + column, mask=is_there, other=0.0).to(tl.float32)
        number = tl.div_rn(number, of_row)
        number = tl.clamp(number, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(values + start + column, number.to(values.dtype.element_ty), mask=is_there)
