"""The Triton functions of `paged_attention_triton.py`: attention to a share of some queries' slots, and the merge.

The block that is the last one to leave a share of some queries merges all of these, in the order of the shares
whichever block that is.
"""
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
def _merge(
    result,
    parts,
    lse,
    where,
    valid,
    ALL: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    SHARES: tl.constexpr,
    PADDED_SHARES: tl.constexpr,
):
    """Adds up the shares of some of ALL queries in their order, each by its sum of weights; 0 where one sees nothing.

    Other multiprocessors have written the shares, which are read from the L2.
    """
    share, column = tl.arange(0, PADDED_SHARES), tl.arange(0, PADDED)
    there = (share < SHARES)[:, None] & valid[None, :]
    sums = lse + share[:, None] * ALL + where[None, :]
    top = tl.max(tl.load(sums, mask=there, other=float("-inf"), cache_modifier=".cg"), axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)

    total = tl.zeros((QUERIES,), tl.float32)
    merged = tl.zeros((QUERIES, PADDED), tl.float32)
    within = (column < DIM)[None, :]
    for index in tl.range(SHARES, loop_unroll_factor=2):
        left = index * ALL + where
        weight = tl.exp2(tl.load(lse + left, mask=valid, other=float("-inf"), cache_modifier=".cg") - top)
        # What a share without weight leaves is not written.
        numbers = parts + left.to(tl.int64)[:, None] * DIM + column[None, :]
        part = tl.load(numbers, mask=(weight > 0)[:, None] & within, other=0.0, cache_modifier=".cg")
        total += weight
        merged += weight[:, None] * part.to(tl.float32)
    merged = merged / tl.where(total > 0, total, 1.0)[:, None]
    at = where.to(tl.int64)[:, None] * DIM + column[None, :]
    tl.store(result + at, merged.to(result.dtype.element_ty), mask=valid[:, None] & within)


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
    arrived,  # int32, zeros, one a row's tile and key-value head: with several shares only, like the last two
    result,  # [R, T, H, D]
    parts,  # [shares, R, T, H, D]
    lse,  # [shares, R, T, H] f32: log2 of the sum of weights
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
    PADDED_SHARES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends from a tile of queries of one key-value head to a share of the slots that they see.

    Queries are numbered (row, column, head of the key-value head's), so the queries of a row, and those of a group of
    rows, are consecutive ones.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    OF_ROW: tl.constexpr = COLUMNS * GROUP
    OF_GROUP: tl.constexpr = IN_GROUP * OF_ROW
    SHARES: tl.constexpr = SHARED_SPLITS + SPLITS
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
            first_query = group * OF_GROUP + tile * QUERIES
            end_query = (group + 1) * OF_GROUP
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

    out = out / tl.where(mass > 0, mass, 1.0)[:, None]
    if SHARES == 1:
        tl.store(result + where[:, None].to(tl.int64) * DIM + column[None, :], out.to(q_tile.dtype), mask=stored)
    else:
        # A share in which a query sees nothing leaves only the sum 0, as a logarithm.
        target = share * (ROWS * COLUMNS * HEADS) + where
        tl.store(lse + target, tl.where(mass > 0, top + tl.log2(mass), float("-inf")), mask=valid)
        stored &= (mass > 0)[:, None]
        if parts.dtype.element_ty == tl.float16:
            out = tl.clamp(out, -65504.0, 65504.0)
        target = target.to(tl.int64)[:, None] * DIM + column[None, :]
        tl.store(parts + target, out.to(parts.dtype.element_ty), mask=stored)
        # All threads have stored before one of them counts the block, at every tile of a row that it has queries of.
        # Counting releases what they stored, and acquires what the blocks counted before have: the last one of a tile
        # sees all shares. It leaves 0, as it found it.
        tl.debug_barrier()
        last_query = tl.minimum(first_query + QUERIES, end_query) - 1
        first_tile = first_query // OF_ROW * TILES + first_query % OF_ROW // QUERIES
        last_tile = last_query // OF_ROW * TILES + last_query % OF_ROW // QUERIES
        for number in range(first_tile, last_tile + 1):
            first = number // TILES * OF_ROW + number % TILES * QUERIES
            end = tl.minimum(first + QUERIES, (number // TILES + 1) * OF_ROW)
            blocks = SPLITS
            if SHARED_SPLITS > 0:
                blocks += SHARED_SPLITS * ((end - 1) % OF_GROUP // QUERIES - first % OF_GROUP // QUERIES + 1)
            counter = arrived + number * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == blocks - 1:
                of_tile = first + tl.arange(0, QUERIES)
                whose = of_tile // GROUP * HEADS + head * GROUP + of_tile % GROUP
                _merge(
                    result, parts, lse, whose, of_tile < end, ROWS * COLUMNS * HEADS, DIM, PADDED, QUERIES, SHARES,
                    PADDED_SHARES,
                )  # fmt: skip
                tl.store(counter, 0)
