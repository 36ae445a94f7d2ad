"""Reference-counted pages: who owns which page of the KV cache, as integers on the device.

A *page* is a physical block of B token slots, the same page number naming the same slots in every layer of every
model. A *block table* row lists the pages of one sequence in order. Sharing a prefix means naming the same pages;
forking and resampling rewrite tables and counts and never touch keys or values.

    refcount[p] = number of block-table entries and cache slots that name p   (the invariant; the trash page excepted)
    free pages  = pages with refcount 0                                       (kept as a stack: free[:num_free])

A *cache slot* names one page that outlives the sequences it was made for. What the page holds, the host knows.

Everything is functional, has static shapes and runs inside jit. Page 0 is the *trash page*: it stands for "no page"
in tables, takes the writes of rows that must write nowhere, is never counted and never allocated.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

from smcjax.pallas.cache.page_tables import (
    MAX_TOUCHED_PAGES,
    fork_mosaic,
    make_room_mosaic,
    supports_page_tables,
    truncate_pages_mosaic,
)
from smcjax.pallas.cache.rotate_and_write import TRASH
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic

Rows = tuple[Num[Array, "R _"], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagePool:
    """The allocator of P pages, the trash page included; every field int32."""

    refcount: Int[Array, " P"]
    free: Int[Array, " P"]  # a stack; entries from `num_free` on are stale
    num_free: Int[Array, ""]

    @classmethod
    def create(cls, num_pages: int) -> PagePool:
        """Makes an allocator with all pages free but the trash page. `num_pages` ≥ 2."""
        return cls(
            refcount=jnp.zeros(num_pages, jnp.int32),
            free=jnp.arange(num_pages, dtype=jnp.int32)[::-1],  # page 1 on top, the trash page out of reach above
            num_free=jnp.asarray(num_pages - 1, jnp.int32),
        )


def allocate(pool: PagePool, needed: Bool[Array, "*shape"]) -> tuple[PagePool, Int[Array, "*shape"]]:
    """Pops one page, with reference count 1, for every true entry; the others get `TRASH`.

    The caller guarantees enough free pages (admission accounts for the worst case). Were there too few, the last
    entries would get `TRASH`: their KV would be lost, no other row's damaged.
    """
    pages, left = _pop(pool, needed.reshape(-1))
    return PagePool(_counted(pool.refcount, pages, 1), pool.free, left), pages.reshape(needed.shape)


def _counted(counts: Int[Array, " P"], pages: Int[Array, " n"], change: int | Int[Array, " n"]) -> Int[Array, " P"]:
    """`counts` with `change` added at `pages`; `TRASH` counts for nothing."""
    return counts.at[pages].add(jnp.where(pages == TRASH, 0, change))


def _pop(pool: PagePool, needed: Bool[Array, " n"]) -> tuple[Int[Array, " n"], Int[Array, ""]]:
    """A free page for each true entry as long as there are some, and how many are left."""
    rank = _running_count(needed)
    granted = needed & (rank <= pool.num_free)
    pages = jnp.where(granted, pool.free[jnp.maximum(pool.num_free - rank, 0)], TRASH)
    return pages, pool.num_free - jnp.minimum(rank[-1], pool.num_free)


def _running_count(flags: Bool[Array, " n"]) -> Int[Array, " n"]:
    """Inclusive cumulative sum. Of few entries by comparing all pairs: one kernel on a GPU instead of three."""
    size = flags.shape[0]
    if size > 1024:
        return jnp.cumsum(flags, dtype=jnp.int32)
    index = jnp.arange(size)
    return jnp.sum(flags[None] & (index[None] <= index[:, None]), axis=1, dtype=jnp.int32)


def _adjust(pool: PagePool, pages: Int[Array, "*shape"], change: Int[Array, "*shape"]) -> PagePool:
    """Adds `change` to the counts of `pages` and pushes the pages that become free."""
    num_pages = pool.refcount.shape[0]
    delta = _counted(jnp.zeros_like(pool.refcount), pages.reshape(-1), change.reshape(-1))
    refcount = pool.refcount + delta
    freed = (delta < 0) & (refcount == 0)
    rank = jnp.cumsum(freed, dtype=jnp.int32)
    slot = jnp.where(freed, pool.num_free + rank - 1, num_pages)  # num_pages is out of range: dropped
    free = pool.free.at[slot].set(jnp.arange(num_pages, dtype=jnp.int32), mode="drop", unique_indices=True)
    return PagePool(refcount, free, pool.num_free + rank[-1])


def release(pool: PagePool, pages: Int[Array, "*shape"]) -> PagePool:
    """Takes one reference from each entry of `pages` (`TRASH` entries count for nothing)."""
    return _adjust(pool, pages, jnp.full_like(pages, -1))


def rebind(pool: PagePool, old: Int[Array, "R M"], new: Int[Array, "R M"]) -> PagePool:
    """The pool after block tables change from `old` to `new`."""
    pages = jnp.stack([old, new])
    return _adjust(pool, pages, jnp.broadcast_to(jnp.asarray([[[-1]], [[1]]], jnp.int32), pages.shape))


def keep_until(
    pool: PagePool,
    old: Int[Array, "R M"],
    table: Int[Array, "R M"],
    length: Int[Array, " R"],
    goes: Bool[Array, " R"],
    *,
    page_size: int,
) -> tuple[PagePool, Int[Array, "R M"]]:
    """Makes the rows that `goes` of block table `old` name the pages of `table` up to their last KV that counts.

    They name no others. The last KV that counts is the one before the frontier, the last of `length` tokens: what
    rejected drafts wrote is behind it. Returns the pool and the new block table.
    """
    begins = jnp.arange(old.shape[1])[None] * page_size
    kept = jnp.where(begins < length[:, None] - 1, table, TRASH)
    new = jnp.where(goes[:, None], kept, old)
    return rebind(pool, old, new), new


def fan_out(pool: PagePool, block_table: Int[Array, "R M"], offspring: Int[Array, " R"]) -> PagePool:
    """The pool after row r of the table has become `offspring[r]` rows: 0 where no row descends from it."""
    return _adjust(pool, block_table, jnp.broadcast_to(offspring[:, None] - 1, block_table.shape))


def _fork_reference(
    pool: PagePool,
    block_table: Int[Array, "R M"],
    rows: Rows,
    source: Int[Array, " R"],
    offspring: Int[Array, " R"],
    begin: Int[Array, " R"],
    end: Int[Array, " R"],
    *,
    group: int,
) -> tuple[PagePool, Int[Array, "R M"], Rows]:
    """Makes every row a copy of row `source[r]` of its group: its block table and each array of `rows`.

    `offspring[r]` is how many rows have r as their source; one that has any must be its own, so that it stays where it
    is. `rows` are arrays [R, …] of 32-bit words; what lies before column `begin[r]` is the same in all rows of a group
    of N = `group`, and from column `end[source[r]]` on anything may be left.
    """
    return fan_out(pool, block_table, offspring), block_table[source], tuple(array[source] for array in rows)


def _fork_sm90(pool: PagePool, *args: Any, **named: Any) -> tuple[PagePool, jax.Array, Rows]:
    counts, free, left, table, rows = fork_mosaic(pool.refcount, pool.free, pool.num_free, *args, **named)
    return PagePool(counts, free, left), table, rows


def _supports_fork(pool: PagePool, block_table: jax.Array, rows: Rows, *args: Any, group: int, **named: Any) -> bool:
    words = all(array.dtype.itemsize == 4 for array in rows)
    return words and supports_page_tables(rows=block_table.shape[0], group=group)


fork = Op(_fork_reference)
fork.register(Kernel(runs_mosaic, _fork_sm90, _supports_fork))


def keep(
    pool: PagePool, cached: Int[Array, " S"], slots: Int[Array, " n"], pages: Int[Array, " n"]
) -> tuple[PagePool, Int[Array, " S"]]:
    """Puts `pages` into cache slots, each a reference. Entries whose slot is S or beyond are left out.

    The slots must be empty, the pages in use.
    """
    kept = jnp.where(slots < cached.shape[0], pages, TRASH)
    pool = PagePool(_counted(pool.refcount, kept, 1), pool.free, pool.num_free)
    return pool, cached.at[slots].set(kept, mode="drop")


def drop(pool: PagePool, cached: Int[Array, " S"], slots: Bool[Array, " S"]) -> tuple[PagePool, Int[Array, " S"]]:
    """Empties the marked cache slots; pages that nothing else names become free."""
    return release(pool, jnp.where(slots, cached, TRASH)), jnp.where(slots, TRASH, cached)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens (host arithmetic)."""
    return -(-num_tokens // page_size)


def page_of(block_table: Int[Array, "R M"], positions: Int[Array, "R T"], page_size: int) -> Int[Array, "R T"]:
    """Physical page of each position; positions outside the table are clipped into it, so mask them."""
    logical = jnp.clip(positions // page_size, 0, block_table.shape[1] - 1)
    return jnp.take_along_axis(block_table, logical, axis=1)


class Room(NamedTuple):
    """The pages that a block of new tokens goes to, as `make_room` decided.

    Nobody writes a slot that is to be copied: a page to copy from is not handed out again, and the row that keeps it
    writes behind its own last token. So a forward may copy and write in any order.
    """

    pool: PagePool
    block_table: Int[Array, "R M"]
    copy_from: Int[Array, " R"]  # page to copy before writing, `TRASH` for none
    copy_to: Int[Array, " R"]


def _make_room_reference(
    pool: PagePool,
    block_table: Int[Array, "R M"],
    first: Int[Array, " R"],
    last: Int[Array, " R"],
    live: Bool[Array, " R"],
    *,
    page_size: int,
    max_width: int,
    group: int,
) -> Room:
    """Gives every live row pages of its own for positions `first`…`last` (at most `max_width` of them).

    Rows are in groups of N = `group`; only rows of one group share a part-filled page.

    Positions before `first` are already in pages. A page that `first` enters half-way and that others share is
    replaced by a copy (copy-on-write), except that the first of its sharers keeps it where all of them would leave: so
    no page is freed here, and a population never needs more pages than its rows' own worst case.
    """
    rows, table_width = block_table.shape
    touched = pages_touched(max_width, page_size)
    logical = first[:, None] // page_size + jnp.arange(touched)[None]
    in_use = live[:, None] & (logical <= last[:, None] // page_size)
    row = jnp.arange(rows)[:, None]
    current = block_table[row, jnp.minimum(logical, table_width - 1)]

    entered_half_way = (first % page_size > 0)[:, None] & (jnp.arange(touched) == 0)[None]
    shared = pool.refcount[current] > 1
    needed = in_use & (~entered_half_way | shared)
    replaced = jnp.where(needed & entered_half_way, current, TRASH)[:, 0]
    keeps = _first_of_all_sharers(pool, replaced)
    needed = needed & ~(keeps[:, None] & entered_half_way)
    replaced = jnp.where(keeps, TRASH, replaced)

    # Replaced pages stay in use by others, so nothing is freed: one update of the counts does for both.
    fresh, left = _pop(pool, needed.reshape(-1))
    pages = jnp.concatenate([replaced, fresh])
    change = jnp.where(jnp.arange(pages.shape[0]) < rows, -1, 1)
    pool = PagePool(_counted(pool.refcount, pages, change), pool.free, left)
    fresh = fresh.reshape(needed.shape)
    target = jnp.where(needed, logical, table_width)  # out of range: dropped
    block_table = block_table.at[row, target].set(fresh, mode="drop")
    return Room(pool, block_table, replaced, jnp.where(replaced == TRASH, TRASH, fresh[:, 0]))


def _make_room_sm90(pool: PagePool, *args: Any, page_size: int, max_width: int, **named: Any) -> Room:
    named |= {"page_size": page_size, "touched": pages_touched(max_width, page_size)}
    counts, left, *where = make_room_mosaic(pool.refcount, pool.free, pool.num_free, *args, **named)
    return Room(PagePool(counts, pool.free, left), *where)


def _supports_room(pool: PagePool, block_table: jax.Array, *args: Any, group: int, **named: Any) -> bool:
    return supports_page_tables(rows=block_table.shape[0], group=group)


def pages_touched(width: int, page_size: int) -> int:
    """Pages that `width` consecutive positions may lie in, wherever the first is."""
    return (width + page_size - 2) // page_size + 1


make_room = Op(_make_room_reference)
make_room.register(Kernel(runs_mosaic, _make_room_sm90, _supports_room))


def _truncate_pages_reference(
    pool: PagePool,
    block_table: Int[Array, "R M"],
    source: Int[Array, " R"] | None,
    before: Int[Array, " R"],
    after: Int[Array, " R"],
    goes: Bool[Array, " R"],
    *,
    page_size: int,
    max_width: int,
    group: int,
) -> tuple[PagePool, Int[Array, "R M"]]:
    """Makes every row that `goes` name the pages of row `source[r]` that hold KV before its frontier, and no others.

    Without a source each keeps its own. Rows had `before` tokens, the last one without KV, and have `after`. The N =
    `group` rows of a group have one source and as many tokens and go together, and pages where they differ or are to
    change hold some of the `max_width` positions from the former frontier on.
    """
    table = block_table if source is None else block_table[source]
    return keep_until(pool, block_table, table, after, goes, page_size=page_size)


def _truncate_pages_sm90(
    pool: PagePool, *args: Any, page_size: int, max_width: int, **named: Any
) -> tuple[PagePool, Int[Array, "R M"]]:
    named |= {"page_size": page_size, "touched": pages_touched(max_width, page_size)}
    counts, free, left, table = truncate_pages_mosaic(pool.refcount, pool.free, pool.num_free, *args, **named)
    return PagePool(counts, free, left), table


def _supports_truncate_pages(
    pool: PagePool, block_table: jax.Array, *args: Any, page_size: int, max_width: int, group: int, **named: Any
) -> bool:
    few = pages_touched(max_width, page_size) <= MAX_TOUCHED_PAGES
    return few and supports_page_tables(rows=block_table.shape[0], group=group)


truncate_pages = Op(_truncate_pages_reference)
truncate_pages.register(Kernel(runs_mosaic, _truncate_pages_sm90, _supports_truncate_pages))


def _first_of_all_sharers(pool: PagePool, pages: Int[Array, " R"]) -> Bool[Array, " R"]:
    """Rows that are the first to name their page in `pages`, where every reference to that page is in `pages`."""
    same = pages[:, None] == pages[None]
    row = jnp.arange(pages.shape[0])
    first = ~(same & (row[None] < row[:, None])).any(axis=1)
    return (pages != TRASH) & first & (same.sum(axis=1) == pool.refcount[pages])
