"""Block tables, reference counts and the stack of free pages, changed in place by Mosaic GPU kernels (Hopper).

    make_room        one launch, one block, a thread a row: who needs a page, who copies one, and the pages themselves
    truncate_pages   one launch, one block, a thread a row: which pages rows keep after part of a block was accepted
    fork             two launches. A block for every 128 columns of a group's table: how often each page of a column is
                named from now on, what becomes free, the new entries; and a block for every row that is to copy what
                its ancestor has generated. Then the freed pages go onto the stack, each block's behind the last one's.

Groups work side by side without atomic operations, since pages are named by several groups only where a cached
prompt is, and there by all rows of a group, so no fork changes their count; and a page stands in one column only. Rows
are copied in place, since survivors stay in their own row: no row is both read and written.

The references are `smcjax.kv`'s operations of the same names; the programs of single threads are `threads`'s.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Num

from smcjax.pallas.cache.rotate_and_write import TRASH
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import pl, plgpu
from smcjax.pallas.mosaic.threads import WARPGROUP, WARPS, Ref, Threads, Word

MAX_ROWS = 1024  # of a batch: rounds of 128 that one block makes room for
MAX_GROUP_ROWS = 32  # rows: a thread compares them all, pair by pair
MAX_TOUCHED_PAGES = 4  # pages of a row that `truncate_pages` looks at, in line
IN_FLIGHT = 4  # words of a row that a thread has asked for before it stores the first


def supports_page_tables(*, rows: int, group: int) -> bool:
    """True for R = `rows` rows in groups of N = `group` that the kernels take."""
    return rows <= MAX_ROWS and group <= MAX_GROUP_ROWS


# ---------------------------------------------------------------------------------------------- programs of a warpgroup


def _flag(t: Threads, condition: Word) -> Word:
    return t.where(condition, 1, 0)


def _make_room(
    t: Threads,
    free: Ref,  # [P] GMEM, as all but the last two
    num_free: Ref,  # [1]
    blocks: Ref,  # [3, R]: each row's first and last position, and whether it is live
    refcount: Ref,  # [P], changed
    table: Ref,  # [R, M], changed
    copy_from: Ref,  # [R]
    copy_to: Ref,  # [R]
    left: Ref,  # [1]
    leaving: Ref,  # [≥ R] SMEM: the page that a row would leave
    totals: Ref,  # [4 · rounds] SMEM
    *,
    shape: tuple[int, int],
    group: int,
    page_size: int,
    touched: int,
) -> None:
    rows, width = shape
    # One block of 128 threads, each of which has every 128th row: `rounds` rows a thread.
    rounds = range(-(-rows // WARPGROUP))
    zero = t.constant(0)
    have = t.load(num_free, zero)

    # What each row writes, and the part-filled page that it enters and does not own alone.
    found = []
    for turn in rounds:
        index = t.index + turn * WARPGROUP
        row = t.minimum(index, rows - 1)
        start, stop, live = (t.load(blocks, row + field * rows) for field in range(3))
        logical, end = start // page_size, stop // page_size + 1
        present = _flag(t, index < rows) * live
        half_way = _flag(t, start % page_size != 0)
        current = t.load(table, row * width + t.minimum(logical, width - 1))
        count = t.load(refcount, current)
        needed = [present * _flag(t, logical + step < end) for step in range(touched)]
        needed[0] = needed[0] * t.where(half_way != 0, _flag(t, count >= 2), 1)
        page = t.where(needed[0] * half_way != 0, current, TRASH)
        t.store(leaving, index, page)
        found.append((index, row, logical, needed, page, count))
    # All of `leaving` is written: a thread reads the entries of its row's whole group below.
    t.synchronize()

    # The first of its sharers keeps such a page where all of them would leave; it sees to the count as well.
    kept = []
    for index, row, logical, needed, page, count in found:
        leader = row // group * group
        # sharers: rows of the group that would leave this page; earlier: those of them before this row. A row without
        # one decides alone for all, so that exactly one thread changes a count.
        sharers, earlier = zero, zero
        for other in range(group):
            same = _flag(t, t.load(leaving, t.minimum(leader + other, rows - 1)) == page)
            sharers = sharers + same
            earlier = earlier + t.where(leader + other < row, same, 0)
        decides = _flag(t, page != TRASH) * _flag(t, earlier == 0)
        keeps = decides * _flag(t, sharers == count)
        t.store(refcount, page, t.where(keeps != 0, 1, count - sharers), only=decides != 0)
        kept.append((index, row, logical, [needed[0] - keeps, *needed[1:]], t.where(keeps != 0, TRASH, page)))

    # Fresh pages are dealt from the stack's top in the order of rows: a row's first has as rank the number of all that
    # rows before it need, a sum over the warpgroup in each round and over the rounds before.
    taken = zero
    for turn, (index, row, logical, needed, page) in zip(rounds, kept, strict=True):
        mine = functools.reduce(lambda a, b: a + b, needed)
        before, all_of_turn = threads.sums(t, mine, totals, turn)
        rank = taken + before
        fresh = []
        for step, need in enumerate(needed):
            rank = rank + need
            # Where the stack is empty a row gets the trash page: its tokens are lost, no other row's.
            granted = need * _flag(t, rank < have + 1)
            new = t.where(granted != 0, t.load(free, t.where(granted != 0, have - rank, 0)), TRASH)
            within = need * _flag(t, logical + step < width)
            t.store(table, row * width + logical + step, new, only=within != 0)
            t.store(refcount, new, zero + 1, only=granted != 0)
            fresh.append(new)
        t.store(copy_from, index, page, only=index < rows)
        t.store(copy_to, index, t.where(page != TRASH, fresh[0], TRASH), only=index < rows)
        taken = taken + all_of_turn
    t.store(left, zero, have - t.minimum(taken, have), only=t.index == 0)


def _truncate_pages(
    t: Threads,
    num_free: Ref,  # [1] GMEM, as all but the last three
    before: Ref,  # [R], tokens, as the next
    after: Ref,
    goes: Ref,  # [R]
    *refs: Any,  # see the unpacking
    shape: tuple[int, int],
    group: int,
    page_size: int,
    touched: int,
) -> None:
    # [R], where rows do not keep their own pages; then what is changed, [P], [R, M] and [P]; [1].
    *source, refcount, table, free, left = refs[:-3]
    # [touched, ≥ R] SMEM: the pages that rows name before, `TRASH` for rows that stay, and afterwards; [4 · rounds].
    named, following, totals = refs[-3:]
    rows, width = shape
    rounds = range(-(-rows // WARPGROUP))
    padded = len(rounds) * WARPGROUP
    zero = t.constant(0)

    # What each row names in the columns that its tokens reach into: now (`old`), and after the cycle (`new`), when it
    # has its ancestor's pages, and those behind its last token are gone.
    found = []
    for turn in rounds:
        index = t.index + turn * WARPGROUP
        row = t.minimum(index, rows - 1)
        ancestor = t.load(source[0], row) if source else row
        start, end = t.load(before, row) - 1, t.load(after, row) - 1
        is_there = (index < rows) & (t.load(goes, row) != 0)
        for step in range(touched):
            column = start // page_size + step
            there = is_there & (column < width)
            within = t.minimum(column, width - 1)
            old = t.where(there, t.load(table, row * width + within), TRASH)
            kept = there & (column * page_size < end)
            new = t.where(kept, t.load(table, ancestor * width + within), TRASH)
            t.store(named, index + step * padded, old)
            t.store(following, index + step * padded, new)
            found.append((turn, step, row, row * width + within, there, old, new))
    # `named` and `following` are whole from here on, and no thread has changed the table that others still read.
    t.synchronize()

    # Of a group's rows the first that names a page sees to its count.
    gone = []
    for turn, step, row, at, there, old, new in found:
        first = row // group * group
        change, earlier = zero, zero
        for other in range(group):
            theirs = t.minimum(first + other, rows - 1) + step * padded
            same = _flag(t, t.load(named, theirs) == old)
            change = change + _flag(t, t.load(following, theirs) == old) - same
            earlier = earlier + t.where(first + other < row, same, 0)
        changes = there & (old != TRASH) & (earlier == 0) & (change != 0)
        count = t.load(refcount, old) + change
        t.store(refcount, old, count, only=changes)
        t.store(table, at, new, only=there)
        gone.append((turn, old, _flag(t, changes & (count == 0))))

    # Pages whose count has become 0 go onto the stack, in the order of rows, by the same sums as in `_make_room`.
    top = t.load(num_free, zero)
    for turn in rounds:
        mine = [(page, goes) for of, page, goes in gone if of == turn]
        before, all_of_turn = threads.sums(
            t, functools.reduce(lambda a, b: a + b, [goes for _, goes in mine]), totals, turn
        )
        place = top + before
        for page, goes in mine:
            t.store(free, place, page, only=goes != 0)
            place = place + goes
        top = top + all_of_turn
    t.store(left, zero, top, only=t.index == 0)


def _fork_tables(
    t: Threads,
    source: Ref,  # [R] GMEM, as all but the last
    offspring: Ref,  # [R]
    refcount: Ref,  # [P], changed
    table: Ref,  # [R, M], changed
    freed: Ref,  # [blocks, 128 · N]
    freed_counts: Ref,  # [blocks]
    totals: Ref,  # [4] SMEM
    block: Word,
    *,
    width: int,
    group: int,
) -> None:
    # A block has 128 columns of one group, a thread one column of all its rows, so that no two threads share a page:
    # a page stands in one column of a group only.
    shares = -(-width // WARPGROUP)
    leader = block // shares * group
    index = block % shares * WARPGROUP + t.index
    there, column = index < width, t.minimum(index, width - 1)
    pages = [t.load(table, (leader + n) * width + column) for n in range(group)]
    more = [t.load(offspring, leader + n) - 1 for n in range(group)]
    counts = [t.load(refcount, page) for page in pages]

    # A page's count changes by offspring − 1 of each row that names it; the first of them writes it.
    gone = []
    for n, page in enumerate(pages):
        change, earlier = t.constant(0), t.constant(0)
        for m, other in enumerate(pages):
            change = change + t.where(other == page, more[m], 0)
            if m < n:
                earlier = earlier + _flag(t, other == page)
        changes = there & (page != TRASH) & (earlier == 0) & (change != 0)
        count = counts[n] + change
        t.store(refcount, page, count, only=changes)
        gone.append(_flag(t, changes & (count == 0)))

    # Freed pages of a block, close together; another kernel puts those of all blocks onto the stack, since blocks do
    # not know of each other.
    place, total = threads.sums(t, functools.reduce(lambda a, b: a + b, gone), totals)
    place = place + block * (group * WARPGROUP)
    for page, goes in zip(pages, gone, strict=True):
        t.store(freed, place, page, only=goes != 0)
        place = place + goes
    t.store(freed_counts, t.constant(0) + block, total, only=t.index == 0)

    # A row that stays is its own ancestor, so no row reads an entry that was written here.
    for n in range(group):
        row = leader + n
        ancestor = t.load(source, row)
        entry = t.load(table, ancestor * width + column)
        t.store(table, row * width + column, entry, only=there & (ancestor != row))


def _copy_words(
    t: Threads, array: Ref, source: Word, target: Word, begin: Word, end: Word, turn: Word, *, width: int
) -> None:
    """Some of the words begin … end of one row of `array`, [R, T] in GMEM, to another."""
    # All loads first, then all stores: a thread's loads are under way together.
    words = []
    for i in range(IN_FLIGHT):
        at = begin + (turn * IN_FLIGHT + i) * WARPGROUP + t.index
        words.append((at, t.load(array, source * width + t.minimum(at, width - 1))))
    for at, word in words:
        t.store(array, target * width + at, word, only=at < end)


def _push(
    t: Threads,
    freed: Ref,  # [blocks, 128 · N] GMEM, as all but the last
    freed_counts: Ref,  # [blocks]
    num_free: Ref,  # [1]
    free: Ref,  # [P], changed
    left: Ref,  # [1]
    totals: Ref,  # [4] SMEM
    block: Word,
    *,
    shape: tuple[int, int],
) -> None:
    blocks, most = shape
    zero = t.constant(0)
    # Every block counts for itself what the blocks before it have freed: its pages lie behind those on the stack.
    earlier = zero
    for turn in range(-(-blocks // WARPGROUP)):
        other = t.index + turn * WARPGROUP
        earlier = earlier + t.where(other < block, t.load(freed_counts, t.minimum(other, blocks - 1)), 0)
    _, before = threads.sums(t, earlier, totals)
    count = t.load(freed_counts, zero + block)
    bottom = before + t.load(num_free, zero)
    pages = [(t.index + i, t.load(freed, block * most + t.index + i)) for i in range(0, most, WARPGROUP)]
    for place, page in pages:
        t.store(free, bottom + place, page, only=place < count)
    t.store(left, zero, bottom + count, only=(t.index == 0) & (block == blocks - 1))


# ------------------------------------------------------------------------------------------------------------ kernels


def make_room_mosaic(
    refcount: Int[Array, " P"],
    free: Int[Array, " P"],
    num_free: Int[Array, ""],
    block_table: Int[Array, "R M"],
    first: Int[Array, " R"],
    last: Int[Array, " R"],
    live: Bool[Array, " R"],
    *,
    group: int,
    page_size: int,
    touched: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Counts, pages left, table, pages to copy from and to. `interpret`: `plgpu.InterpretGPUParams()` to run on a CPU.

    `touched` is how many pages a row's new tokens can reach into.
    """
    rows, width = block_table.shape
    rounds = -(-rows // WARPGROUP)
    counts, table = jax.new_ref(refcount), jax.new_ref(block_table)

    def kernel(*refs: Ref, leaving: Ref, totals: Ref) -> None:
        (free, num_free, blocks), (counts, table), outs = refs[:3], refs[3:5], refs[5:]
        program = functools.partial(_make_room, shape=(rows, width), group=group, page_size=page_size, touched=touched)
        args = (free, num_free, blocks, counts, table, *outs, leaving, totals)
        threads.run(program, *args, interpret=interpret is not None)

    copy_from, copy_to, left = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in (rows, rows, 1)],
        grid=(1,),
        grid_names=("block",),
        scratch_types={
            "leaving": plgpu.SMEM((rounds * WARPGROUP,), jnp.int32),
            "totals": plgpu.SMEM((rounds * WARPS,), jnp.int32),
        },
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="make_room",
    )(free, num_free.reshape(1), jnp.stack([first, last, live.astype(jnp.int32)]), counts, table)
    return jax.freeze(counts), left[0], jax.freeze(table), copy_from, copy_to


def truncate_pages_mosaic(
    refcount: Int[Array, " P"],
    free: Int[Array, " P"],
    num_free: Int[Array, ""],
    block_table: Int[Array, "R M"],
    source: Int[Array, " R"] | None,
    before: Int[Array, " R"],
    after: Int[Array, " R"],
    goes: Bool[Array, " R"],
    *,
    group: int,
    page_size: int,
    touched: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Counts, free stack, its height, table. `touched` is how many pages a row's new tokens can reach into."""
    rows, width = block_table.shape
    rounds = -(-rows // WARPGROUP)
    counts, table, stack = (jax.new_ref(array) for array in (refcount, block_table, free))

    def kernel(*refs: Ref, named: Ref, following: Ref, totals: Ref) -> None:
        program = functools.partial(
            _truncate_pages, shape=(rows, width), group=group, page_size=page_size, touched=touched
        )
        threads.run(program, *refs, named, following, totals, interpret=interpret is not None)

    (left,) = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((1,), jnp.int32)],
        grid=(1,),
        grid_names=("block",),
        scratch_types={
            "named": plgpu.SMEM((touched * rounds * WARPGROUP,), jnp.int32),
            "following": plgpu.SMEM((touched * rounds * WARPGROUP,), jnp.int32),
            "totals": plgpu.SMEM((rounds * WARPS,), jnp.int32),
        },
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="settle",
    )(num_free.reshape(1), before, after, goes, *(() if source is None else (source,)), counts, table, stack)
    return jax.freeze(counts), jax.freeze(stack), left[0], jax.freeze(table)


def fork_mosaic(
    refcount: Int[Array, " P"],
    free: Int[Array, " P"],
    num_free: Int[Array, ""],
    block_table: Int[Array, "R M"],
    rows: tuple[Num[Array, "R _"], ...],
    source: Int[Array, " R"],
    offspring: Int[Array, " R"],
    begin: Int[Array, " R"],
    end: Int[Array, " R"],
    *,
    group: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Counts, free stack, its height, table, and `rows`: arrays of 32-bit words, copied from `begin` to `end`."""
    num_rows, width = block_table.shape
    tables = num_rows // group * -(-width // WARPGROUP)  # blocks
    counts, table = jax.new_ref(refcount), jax.new_ref(block_table)
    copied = [jax.new_ref(array) for array in rows]

    def kernel(*refs: Ref, totals: Ref) -> None:
        (source, offspring, begin, end, counts, table), (*copied, freed, freed_counts) = refs[:6], refs[6:]
        block = lax.axis_index("block")

        @pl.when(block < tables)
        def _tables() -> None:
            program = functools.partial(_fork_tables, width=width, group=group)
            args = (source, offspring, counts, table, freed, freed_counts, totals, block)
            threads.run(program, *args, interpret=interpret is not None)

        @pl.when(block >= tables)
        def _row() -> None:
            row = block - tables
            ancestor = source[row]

            @pl.when(ancestor != row)
            def _copy() -> None:
                first, last = begin[row], end[ancestor]

                def some(turn: jax.Array, _: None) -> None:
                    for array in copied:
                        program = functools.partial(_copy_words, width=array.shape[1])
                        args = (array, ancestor, row, first, last, turn)
                        threads.run(program, *args, interpret=interpret is not None)

                at_once = IN_FLIGHT * WARPGROUP
                lax.fori_loop(0, lax.div(last - first + (at_once - 1), at_once), some, None)

    freed, freed_counts = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((tables, group * WARPGROUP), jnp.int32),
            jax.ShapeDtypeStruct((tables,), jnp.int32),
        ],
        grid=(tables + num_rows,),
        grid_names=("block",),
        scratch_types={"totals": plgpu.SMEM((WARPS,), jnp.int32)},
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="fork",
    )(source, offspring, begin, end, counts, table, *copied)

    stack = jax.new_ref(free)

    def push(freed: Ref, freed_counts: Ref, num_free: Ref, stack: Ref, left: Ref, totals: Ref) -> None:
        program = functools.partial(_push, shape=(tables, group * WARPGROUP))
        args = (freed, freed_counts, num_free, stack, left, totals, lax.axis_index("block"))
        threads.run(program, *args, interpret=interpret is not None)

    (left,) = plgpu.kernel(
        push,
        out_type=[jax.ShapeDtypeStruct((1,), jnp.int32)],
        grid=(tables,),
        grid_names=("block",),
        scratch_types={"totals": plgpu.SMEM((WARPS,), jnp.int32)},
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="push_freed",
    )(freed, freed_counts, num_free.reshape(1), stack)
    return jax.freeze(counts), jax.freeze(stack), left[0], jax.freeze(table), tuple(map(jax.freeze, copied))
