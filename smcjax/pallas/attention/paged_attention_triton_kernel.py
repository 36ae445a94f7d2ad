"""The Triton functions of `paged_attention_triton.py`: attention to a share of some queries' slots, and the merge."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pages(names, start, stop, PAGE: tl.constexpr, SLOTS: tl.constexpr):
    """The page of each slot of a step by a row's table `names`; the trash page from `stop` on."""
    slot = start + tl.arange(0, SLOTS)
    return tl.load(names + slot // PAGE, mask=slot < stop, other=0)


@triton.jit
def _step(
    top,
    mass,
    out,
    q,
    keys,
    values,
    page,
    slot,
    stop,
    limit,
    begin,
    of_head,
    PAGE: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of slots: returns the online softmax's maximum, sum and output with them."""
    column = tl.arange(0, PADDED)
    # A page's number times its size overflows 32 bits in a large pool.
    at = ((page.to(tl.int64) * PAGE + slot % PAGE) * KV_WIDTH + of_head)[:, None] + column[None, :]
    within = column[None, :] < DIM
    if PADDED == DIM:
        k = tl.load(keys + at)
    else:
        k = tl.load(keys + at, mask=within, other=0.0)

    # What a slot that holds no KV gives, NaN perhaps, is replaced before anything is made of it.
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
    if MASKED:
        seen = slot[None, :] < limit[:, None]
        if WINDOWED:
            seen &= slot[None, :] >= begin[:, None]
        scores = tl.where(seen, scores, float("-inf"))

    # A query that has seen nothing yet has the maximum −∞; 0 in its place gives weights of 0, and no ∞ − ∞.
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    mass = mass * kept + tl.sum(weights, axis=1)

    # 0 · NaN is NaN: values of slots that hold none are not read.
    if MASKED:
        there = slot < stop
        if PADDED == DIM:
            v = tl.load(values + at, mask=there[:, None], other=0.0)
        else:
            v = tl.load(values + at, mask=there[:, None] & within, other=0.0)
    elif PADDED == DIM:
        v = tl.load(values + at)
    else:
        v = tl.load(values + at, mask=within, other=0.0)
    out = tl.dot(weights.to(v.dtype), v, out * kept[:, None], input_precision=PRECISION)
    return higher, mass, out


@triton.jit
def attend(
    q,  # [R, T, H, D]
    keys,  # [P, B, Hkv, D]
    values,  # [P, B, Hkv, D]
    table,  # [R, M] int32
    positions,  # [R, T] int32
    lengths,  # [R] int32
    common,  # [R / N] int32: slots that the rows of a group share; with shared parts only, like the next
    leaders,  # [R / N] int32: a row whose table names them
    parts,  # [shares, R, T, H, D]
    lse,  # [shares, R, T, H] f32: log2 of the sum of weights; with several shares only
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TABLE: tl.constexpr,
    PAGE: tl.constexpr,
    IN_GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARED_TILES: tl.constexpr,
    SHARED_SPLITS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    SETTLED: tl.constexpr,
    MERGED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends from a tile of queries of one key-value head to a share of the slots that they see.

    Queries are numbered (row, column, head of the key-value head's), so the queries of a row, and those of a group of
    rows, are consecutive ones.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    OF_ROW: tl.constexpr = COLUMNS * GROUP
    SHARED_UNITS: tl.constexpr = ROWS // IN_GROUP * SHARED_TILES * SHARED_SPLITS
    unit, head = tl.program_id(0), tl.program_id(1)

    # Which queries, whose table, and which share of its slots. The first blocks attend from all rows of a group to what
    # they share, the others from single rows to the rest. A row's last queries, which see most, begin first.
    number = unit - SHARED_UNITS
    split, tile = number % SPLITS, TILES - 1 - number // SPLITS % TILES
    row = number // (SPLITS * TILES)
    first_query, end_query = row * OF_ROW + tile * QUERIES, (row + 1) * OF_ROW
    splits, share = SPLITS, SHARED_SPLITS + split
    of_all = unit < SHARED_UNITS
    if SHARED_SPLITS > 0:
        group = tl.where(of_all, unit // (SHARED_SPLITS * SHARED_TILES), row // IN_GROUP)
        if of_all:
            split, tile = unit % SHARED_SPLITS, unit // SHARED_SPLITS % SHARED_TILES
            row = tl.load(leaders + group)
            first_query = group * (IN_GROUP * OF_ROW) + tile * QUERIES
            end_query = (group + 1) * (IN_GROUP * OF_ROW)
            splits, share = SHARED_SPLITS, split

    # The slots that each query sees: from `begin` to before `limit`, of those that hold KV and have a page.
    query = first_query + tl.arange(0, QUERIES)
    valid = query < end_query
    token = query // GROUP
    position = tl.load(positions + token, mask=valid, other=-1)
    length = tl.load(lengths + token // COLUMNS, mask=valid, other=0)
    limit = tl.minimum(tl.minimum(position + 1, length), TABLE * PAGE)
    begin = tl.maximum(position + 1 - WINDOW, FIRST)

    # The slots that some query of the tile sees, of these the block's share: whole blocks of slots but the last.
    high = tl.max(limit, axis=0)
    low = FIRST
    if WINDOW > 0:
        low = tl.min(tl.where(limit > 0, begin, TABLE * PAGE), axis=0)
    if SHARED_SPLITS > 0:
        same = tl.load(common + group)
        high = tl.where(of_all, tl.minimum(high, same), high)
        low = tl.where(of_all, low, tl.maximum(low, same))
    each = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), SLOTS), splits) * SLOTS
    start = low + split * each
    stop = tl.minimum(high, start + each)
    limit = tl.minimum(limit, stop)

    column = tl.arange(0, PADDED)
    where = token * HEADS + head * GROUP + query % GROUP  # [R, T, H]
    stored = valid[:, None] & (column[None, :] < DIM)
    q_tile = tl.load(q + where[:, None].to(tl.int64) * DIM + column[None, :], mask=stored, other=0.0)
    names, of_head = table + row * TABLE, head * DIM
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    mass = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, PADDED), tl.float32)

    # Slots that all queries of the tile see need no mask; queries that see nothing have no say, and no meaning. The
    # names of a step's pages come while the step before is computed, so that no load of pages waits for their names.
    page = _pages(names, start, stop, PAGE, SLOTS)
    masked = start
    if SETTLED:
        all_see = tl.min(tl.where(limit > 0, limit, stop), axis=0)
        masked = start + tl.maximum(all_see - start, 0) // SLOTS * SLOTS
        for at in tl.range(start, masked, SLOTS):
            following = _pages(names, at + SLOTS, stop, PAGE, SLOTS)
            top, mass, out = _step(
                top, mass, out, q_tile, keys, values, page, at + tl.arange(0, SLOTS), stop, limit, begin, of_head,
                PAGE, KV_HEADS * DIM, DIM, PADDED, WINDOW > 0, False, SCALE, PRECISION,
            )  # fmt: skip
            page = following
    for at in tl.range(masked, stop, SLOTS):
        following = _pages(names, at + SLOTS, stop, PAGE, SLOTS)
        top, mass, out = _step(
            top, mass, out, q_tile, keys, values, page, at + tl.arange(0, SLOTS), stop, limit, begin, of_head,
            PAGE, KV_HEADS * DIM, DIM, PADDED, WINDOW > 0, True, SCALE, PRECISION,
        )  # fmt: skip
        page = following

    # A share in which a query sees nothing leaves only the sum 0, as a logarithm.
    out = out / tl.where(mass > 0, mass, 1.0)[:, None]
    target = (share * (ROWS * COLUMNS * HEADS) + where).to(tl.int64)
    if MERGED:
        tl.store(lse + target, tl.where(mass > 0, top + tl.log2(mass), float("-inf")), mask=valid)
        stored &= (mass > 0)[:, None]
        if parts.dtype.element_ty == tl.float16:
            out = tl.clamp(out, -65504.0, 65504.0)
    tl.store(parts + target[:, None] * DIM + column[None, :], out.to(parts.dtype.element_ty), mask=stored)


@triton.jit
def merge(
    parts,  # [shares, R·T·H, D]
    lse,  # [shares, R·T·H] f32
    out,  # [R·T·H, D]
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SHARES: tl.constexpr,
    PADDED_SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up the shares of some queries in their order, each by its sum of weights; 0 where a query sees nothing."""
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = query < QUERIES
    share, column = tl.arange(0, PADDED_SHARES), tl.arange(0, PADDED)
    there = (share < SHARES)[:, None] & valid[None, :]
    sums = tl.load(lse + share[:, None] * QUERIES + query[None, :], mask=there, other=float("-inf"))
    top = tl.max(sums, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)

    total = tl.zeros((BLOCK,), tl.float32)
    merged = tl.zeros((BLOCK, PADDED), tl.float32)
    within = (column < DIM)[None, :]
    for index in tl.range(SHARES, loop_unroll_factor=4):
        weight = tl.exp2(tl.load(lse + index * QUERIES + query, mask=valid, other=float("-inf")) - top)
        # What a share without weight leaves is not written.
        at = (index * QUERIES + query).to(tl.int64)[:, None] * DIM + column[None, :]
        part = tl.load(parts + at, mask=(weight > 0)[:, None] & within, other=0.0).to(tl.float32)
        total += weight
        merged += weight[:, None] * part
    merged = merged / tl.where(total > 0, total, 1.0)[:, None]
    at = query[:, None].to(tl.int64) * DIM + column[None, :]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=valid[:, None] & within)
